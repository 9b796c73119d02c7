"""The plan names every kernel that a layer launches, at any number of tokens: what is loaded at start is enough."""

import functools
import importlib
import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin import plan
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.fused_moe import batched_experts
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.ops.route import route
from tests import helpers as h

layer_ops = importlib.import_module("fp8moe_plugin.ops.fused_moe")  # the op has taken its name
HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 4, 2
WIDE = plan.GATHER_UP_TO + 128  # experts that read copies of their tokens


def replace_everywhere(monkeypatch: pytest.MonkeyPatch, name: str, fake: object) -> None:
    """Stand in for a function in every module of the ops that has imported it."""
    for path, module in list(sys.modules.items()):
        if path.startswith("fp8moe_plugin.ops.") and hasattr(module, name):
            monkeypatch.setattr(module, name, fake)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[plan.KernelKey]:
    """The keys of all launches, which are recorded in place of being made."""
    keys: set[plan.KernelKey] = set()
    fakes = {
        "launch": lambda key, *_, **__: keys.add(key),
        "uses_sm90": lambda _: True,
        "multiprocessors": lambda _: 132,
        "tensor_map": lambda *_: None,
    }
    for name, fake in fakes.items():
        replace_everywhere(monkeypatch, name, fake)
    return keys


@pytest.fixture
def steps(launched, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What an op does, in order: source and `early` of each launch, ("scratch", False) where memory is taken."""
    done: list[tuple[str, bool]] = []

    def launch(
        key: plan.KernelKey, grid: object, args: object, device: object, early: bool = False, cluster: int = 1
    ) -> None:
        done.append((key.source, early))

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        done.append(("scratch", False))
        return torch.empty(shape, dtype=dtype, device=device)

    replace_everywhere(monkeypatch, "launch", launch)
    replace_everywhere(monkeypatch, "empty", empty)
    return done


def between(steps: list[tuple[str, bool]], first: str, last: str) -> list[str]:
    names = [name for name, _ in steps]
    return names[names.index(first) + 1 : names.index(last)]


@pytest.fixture
def no_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    h.force_small_batch(monkeypatch, 0)


@pytest.mark.parametrize("tokens", [7, 383, 384, 1000])
@pytest.mark.parametrize("intermediate", [INTERMEDIATE, plan.EARLY_FROM, WIDE])
def test_kernels_that_start_early_follow_those_they_may_run_beside(steps, no_small_batches, intermediate, tokens):
    layer = h.random_layer(h.seeded(0, torch.device("cpu")), EXPERTS, HIDDEN, intermediate)
    ids = torch.zeros(tokens, TOPK, dtype=torch.int32)
    fused_moe(torch.zeros(tokens, HIDDEN).bfloat16(), *layer, torch.rand(tokens, TOPK), ids)
    block_m = plan.moe_block_m(tokens, TOPK, EXPERTS)
    gathers = plan.gathers(intermediate, block_m)
    early = plan.starts_early(tokens * TOPK / EXPERTS, intermediate, block_m)
    counted = {"route"} if plan.route_chunks(tokens * TOPK) > 1 else set()
    follow = {"gate_up_few_rows", "grouped_gemm_few_rows", "combine"} if block_m == plan.DECODE_BLOCK_M else set()
    expected = counted | follow | ({"quantize"} if gathers else set()) | ({"grouped_gemm"} if early else set())
    assert {name for name, starts_early in steps if starts_early} == expected
    if counted:
        assert between(steps, "count_experts", "route") == []
    if gathers:
        assert between(steps, "route", "quantize") == []
    if early:
        assert between(steps, "gate_up", "grouped_gemm") == []


def test_the_second_gemm_starts_early_but_where_narrow_experts_have_many_rows():
    for intermediate in (128, 256, plan.EARLY_FROM - 128, plan.EARLY_FROM, WIDE):
        for rows in (1, plan.EARLY_BELOW - 1, plan.EARLY_BELOW, 10_000):
            early = plan.starts_early(rows, intermediate, plan.PREFILL_BLOCK_M)
            keeps_b = plan.keeps_b(rows, intermediate, plan.PREFILL_BLOCK_M)
            assert keeps_b == (intermediate <= 256 and rows >= plan.EARLY_BELOW)
            assert early == (intermediate >= plan.EARLY_FROM or rows < plan.EARLY_BELOW or keeps_b)
            assert not plan.starts_early(rows, intermediate, plan.DECODE_BLOCK_M)
            assert not plan.keeps_b(rows, intermediate, plan.DECODE_BLOCK_M)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("intermediate", [128, 256, 384, plan.EARLY_FROM])
def test_the_second_gemm_keeps_weights_of_narrow_experts_with_many_rows_over_all_ranks(launched, intermediate, ranks):
    gen = h.seeded(0, torch.device("cpu"))
    layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate)
    expert_map = torch.zeros(ranks * EXPERTS, dtype=torch.int32)
    enough = plan.EARLY_BELOW * ranks * EXPERTS // TOPK
    for tokens in (enough - 1, enough):
        launched.clear()
        routing = torch.rand(tokens, TOPK), torch.zeros(tokens, TOPK, dtype=torch.int32)
        fused_moe(torch.zeros(tokens, HIDDEN).bfloat16(), *layer, *routing, expert_map=expert_map)
        keeps_b = intermediate <= plan.KEEP_B_UP_TO and tokens == enough
        second = {key for key in launched if dict(key.defines).get("OUTPUT") == plan.Output.BF16}
        assert second == {plan.grouped_gemm_key(plan.Output.BF16, keep_b=keeps_b)}


@pytest.mark.parametrize("max_m", [1, 3])
def test_the_second_gemm_of_slabs_starts_right_behind_the_first(steps, max_m):
    gen = h.seeded(0, torch.device("cpu"))
    layer, tokens = h.random_layer(gen, EXPERTS, HIDDEN, WIDE), h.random_quantized(gen, EXPERTS, max_m, HIDDEN)
    batched_experts(*tokens, *layer, torch.ones(EXPERTS, dtype=torch.int32), expected_m=1000)
    assert steps[-2:] == [("gate_up", False), ("grouped_gemm", True)]


@pytest.mark.parametrize("ue8m0", [False, True])
def test_layers_launch_what_their_plan_names_and_nothing_else(launched, ue8m0):
    gen = h.seeded(0, torch.device("cpu"))
    hiddens = (HIDDEN, 2048, 4096, 4224)  # one for each kernel of a small batch
    for hidden, intermediate in (*((hidden, INTERMEDIATE) for hidden in hiddens), (HIDDEN, WIDE)):
        layer = h.random_layer(gen, EXPERTS, hidden, intermediate)
        for tokens in (1, 7, 9, 16, 64, 128, 129, 1000):
            x = h.random_tokens(gen, tokens, hidden)
            weights, ids = torch.rand(tokens, TOPK), torch.zeros(tokens, TOPK, dtype=torch.int32)
            fused_moe(x, *layer, weights, ids, ue8m0=ue8m0)
            fused_moe(x, *layer, weights, ids.long(), ue8m0=ue8m0)
    assert launched == set(plan.moe_kernels(ue8m0, batched=False))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_batched_experts_launch_what_their_plan_names_and_nothing_else(launched, ue8m0):
    gen = h.seeded(0, torch.device("cpu"))
    layer = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    tokens = h.random_quantized(gen, EXPERTS, 8, HIDDEN)
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    launched.clear()  # making the tokens quantized them
    for expected_m in (1, 64, 65, 1000):
        batched_experts(*tokens, *layer, counts, expected_m=expected_m, ue8m0=ue8m0)
    assert launched == set(plan.moe_kernels(ue8m0, batched=True))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_linear_layer_launches_what_its_plan_names_and_nothing_else(launched, ue8m0):
    gen = h.seeded(0, torch.device("cpu"))
    for n, k in ((64, plan.LONG_K), (4096, 128), (16384, 128)):
        weight = h.random_weights(gen, n, k)
        for tokens in (1, 64, 65, 1024):
            fp8_linear(h.random_tokens(gen, tokens, k), *weight, ue8m0=ue8m0)
    assert launched == set(plan.linear_kernels(ue8m0))


@pytest.mark.parametrize("intermediate", [INTERMEDIATE, WIDE])
@pytest.mark.parametrize("tokens", [1, 7, 128, 129, 1000])
def test_the_scratch_of_a_layer_is_what_the_plan_says(launched, monkeypatch, tokens, intermediate):
    scratch = []

    def recorded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        scratch.append(torch.empty(shape, dtype=dtype, device=device))
        return scratch[-1]

    replace_everywhere(monkeypatch, "empty", recorded)
    gen = h.seeded(0, torch.device("cpu"))
    layer = h.random_layer(gen, EXPERTS, HIDDEN, intermediate)
    ids = torch.zeros(tokens, TOPK, dtype=torch.int32)
    expert_map = torch.zeros(2 * EXPERTS, dtype=torch.int32)
    for experts, global_experts in ((None, EXPERTS), (expert_map, 2 * EXPERTS)):
        scratch.clear()
        fused_moe(h.random_tokens(gen, tokens, HIDDEN), *layer, torch.rand(tokens, TOPK), ids, expert_map=experts)
        local = Experts(layers=1, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, intermediate=intermediate)
        assert plan.moe_workspace_bytes(local, tokens, global_experts) == sum(t.nbytes for t in scratch)


def without_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "k_splits", lambda *_: 1)
    for module, name in ((plan, "moe_scratch"), (layer_ops, "_layer_launches")):
        fresh = functools.lru_cache(getattr(module, name).__wrapped__)
        for user in (plan, layer_ops):
            if hasattr(user, name):
                monkeypatch.setattr(user, name, fresh)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("intermediate", [INTERMEDIATE, WIDE])
@pytest.mark.parametrize("tokens", [1, 7, 128, 129, 1000])
def test_a_layer_launches_what_its_ops_launch_one_by_one(
    launched, monkeypatch, no_small_batches, tokens, intermediate, mapped, ids_dtype
):
    """In the same order, with the same numbers and the same addresses left out, and with pieces of the same sizes."""
    launches, scratch = [], []

    def launch(
        key: plan.KernelKey, grid: object, args: tuple[int, ...], device: int, early: bool = False, cluster: int = 1
    ) -> None:
        letters = plan.PARAMETERS[key.source]
        assert len(args) == len(letters)
        numbers = [bool(a) if x == "P" else a for a, x in zip(args, letters, strict=True)]
        if key.source in ("gate_up", "grouped_gemm"):
            numbers[letters.rindex("P") - 2] = False  # its counters: only the layer lets GEMM 2 start early
        if key.source == "grouped_gemm_few_rows":  # its pair of counters and those of rows that are done: likewise
            numbers[-4], numbers[-2:] = 0, (False, 0)
        if key.source == "gate_up_few_rows":
            numbers[letters.rindex("P") - 2] = False
        if "gemm" in key.source or "gate_up" in key.source or key == plan.combine_key():
            early = False
        launches.append((key, grid, numbers, early))

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        scratch.append(torch.empty(shape, dtype=dtype))
        return scratch[-1]

    replace_everywhere(monkeypatch, "launch", launch)
    replace_everywhere(monkeypatch, "empty", empty)
    without_splits(monkeypatch)  # only the layer has them
    gen = h.seeded(0, torch.device("cpu"))
    w13, w13_scale, w2, w2_scale = h.random_layer(gen, EXPERTS, HIDDEN, intermediate)
    x, ids = h.random_tokens(gen, tokens, HIDDEN), torch.zeros(tokens, TOPK, dtype=ids_dtype)
    launches.clear()
    expert_map = torch.zeros(2 * EXPERTS, dtype=torch.int32) if mapped else None
    weights = layer_ops.ExpertWeights((w13, w13_scale), (w2, w2_scale))
    layers = []
    for layer in (layer_ops._launch_fused_moe, layer_ops._fused_moe):
        scratch.clear()
        layer(x, weights, torch.rand(tokens, TOPK), ids, expert_map, True, torch.empty_like(x))
        layers.append(list(launches))
        launches.clear()
    assert layers[0] == layers[1]
    begins = plan.moe_scratch(tokens, TOPK, HIDDEN, intermediate, EXPERTS, (1 + mapped) * EXPERTS)
    pieces = [after - begin for begin, after in itertools.pairwise(begins)]
    in_pieces = [-(-t.nbytes // plan.PIECE) * plan.PIECE for t in scratch]
    assert sorted(filter(None, pieces)) == sorted(in_pieces)


@pytest.mark.parametrize(
    ("tokens", "hidden", "fetched"),
    [(1, 7168, (128, 128)), (64, 2048, (128, 128)), (64, 7168, (256, 128)), (8192, 2048, (256, 256))],
)
def test_l2_fetches_single_lines_of_weights_that_are_read_once(launched, monkeypatch, tokens, hidden, fetched):
    """But for long rows of which a block reads all."""
    by_address = {}
    replace_everywhere(monkeypatch, "tensor_map", lambda *args: by_address.__setitem__(args[0], args[-1]))
    addresses = layer_ops.LayerAddresses(*(2**40 + i * 2**36 for i in range(len(layer_ops.LayerAddresses._fields))))
    layer_ops._layer_launches(addresses, (tokens, 8, hidden, 256, 128, 128), False, False, -3)
    assert (by_address[addresses.w13], by_address[addresses.w2]) == fetched


@pytest.mark.parametrize("intermediate", [INTERMEDIATE, WIDE])
@pytest.mark.parametrize("tokens", [1, 129, 1000])
def test_the_launches_of_a_layer_are_remembered_for_its_addresses_alone(launched, monkeypatch, tokens, intermediate):
    """Tensors at other addresses, each in its turn, are read and written there."""
    replace_everywhere(monkeypatch, "tensor_map", lambda address, *_: address)
    sizes = (tokens, TOPK, HIDDEN, intermediate, EXPERTS, 2 * EXPERTS)
    first = layer_ops.LayerAddresses(*(2**40 + i * 2**32 for i in range(len(layer_ops.LayerAddresses._fields))))
    for field in first._fields:
        moved = first._replace(**{field: 2**45})
        for addresses in (first, moved, first):
            launches = layer_ops._layer_launches(addresses, sizes, False, False, -2)
            used = {arg for launch in launches for arg in launch.args}
            assert set(addresses) <= used
            assert (2**45 in used) == (addresses is moved)


def test_a_small_batch_is_one_of_few_tokens_and_few_bytes():
    deepseek_v3, tp8, qwen3_30b = (7168, 2048, 256, 256), (7168, 256, 256, 256), (2048, 768, 128, 128)
    assert [plan.small_batch(tokens, 8, *tp8) for tokens in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    assert [plan.small_batch(tokens, 8, *qwen3_30b) for tokens in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    assert [plan.small_batch(tokens, 8, *deepseek_v3) for tokens in (1, 2, 3)] == [8, 8, 0]
    ep8 = (7168, 2048, 32, 256)
    assert [plan.small_batch(tokens, 8, *ep8) for tokens in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    assert plan.small_batch(8, 33, 128, 128, 4, 4) == plan.small_batch(1, 8, 8192 + 128, 128, 4, 4) == 0


@pytest.mark.parametrize("kind", plan.SMALL_BATCH_STAGES)
def test_a_multiprocessor_has_room_for_a_block_of_the_first_gemm_of_a_small_batch_and_another(kind):
    first, second = plan.gate_up_small_batch_key(False, *kind), plan.down_small_batch_key(*kind)
    for pair in (first, first), (first, second):
        assert sum(key.smem_bytes + 1024 for key in pair) <= 228 * 1024
        assert sum(key.threads for key in pair) <= 2048


@pytest.mark.parametrize("width", plan.SMALL_BATCHES)
@pytest.mark.parametrize("hidden", [128, 1024, 2048, 3072, 4096, 5120, 7168, 8192])
def test_the_second_gemm_has_enough_blocks_and_no_more_than_multiprocessors(hidden, width):
    splits = plan.down_splits(hidden, width)
    assert hidden // 128 * splits <= plan.MULTIPROCESSORS
    assert splits == plan.CLUSTER_SPLITS or hidden // 128 * splits >= plan.DOWN_BLOCKS[width]


def test_channels_of_models_are_shared_by():
    shares = {2048: (4, 5), 3072: (3, 4), 4096: (2, 3), 5120: (2, 2), 7168: (2, 2), 8192: (1, 2)}
    assert {hidden: (plan.down_splits(hidden, 8), plan.down_splits(hidden, 16)) for hidden in shares} == shares


def test_few_tiles_go_to_one_cluster_more():
    assert [plan.gate_up_clusters(tiles, 132, 4) for tiles in (1, 33, 99, 100)] == [1, 33, 33, 31]
    assert [plan.gate_up_clusters(tiles, 132, 8) for tiles in (1, 15, 16, 48, 49, 500)] == [1, 15, 16, 16, 15, 15]


@pytest.mark.parametrize("hidden", [128, 2048, 5120, 7168])
@pytest.mark.parametrize("intermediate", [128, 256, 2048])
def test_k_is_split_while_parts_fit_a_gpu_and_sums_are_few_bytes(hidden, intermediate):
    before = 8
    for rows in (1, 8, 64, 500, 512, 8192, 16384):
        splits = plan.k_splits(rows, 256, hidden, intermediate)
        assert hidden // 128 % splits == 0
        assert splits == 1 or 8 * rows * intermediate * splits <= plan.SPLIT_BYTES
        assert splits <= before, "more rows never need more splits"
        assert splits == 1 or splits * min(rows, 256) * intermediate // 128 <= plan.MULTIPROCESSORS
        before = splits
    assert plan.k_splits(8, 256, 7168, 256) == 8


@pytest.mark.parametrize(("n", "k", "columns"), [(7168, 128, 8), (7168, 256, 4), (2048, 768, 2), (7168, 2048, 1)])
def test_a_block_takes_several_columns_where_k_is_short(n, k, columns):
    assert plan.columns_at_once(4096, 256, n, k) == columns
    for rows in (1, 3, 8, 64):
        fewer = plan.columns_at_once(rows, 256, n, k)
        assert n // 128 % fewer == 0
        assert fewer == 1 or rows * (n // 128 // fewer) >= plan.MULTIPROCESSORS * 3 // 4
    assert plan.columns_at_once(4096, 256, 200, k) <= 2


SHAPES = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (8, 128), (128, 18432), (320, 2944)]


def test_few_rows_stream_weights_where_columns_are_few_and_k_is_long():
    keys = {shape: plan.dense_key(32, *shape, plan.Output.BF16, 132) for shape in SHAPES}
    streamed = [shape for shape, key in keys.items() if key == plan.dense_gemm_few_rows_key()]
    assert streamed == [(2112, 7168), (128, 18432)]
    assert all(plan.dense_key(33, *shape, plan.Output.BF16, 132) != plan.dense_gemm_few_rows_key() for shape in SHAPES)
    assert [plan.dense_width(m) for m in (1, 8, 9, 17, 32)] == [8, 8, 16, 32, 32]
    assert min(plan.CLUSTER_SPLITS, plan.LONG_K // 128) >= plan.DENSE_SPLITS


def test_dense_tiles_are_as_fast_as_any_were():
    """Of those timed on an H200 (benchmarks/NOTES.md)."""
    rows = (1, 64, 128, 192, 256)
    assert [[plan.dense_tile(m, n, k, 132) for m in rows] for n, k in SHAPES[:5]] == [
        [(64, 16), (64, 16), (64, 32), (64, 64), (64, 64)],
        [(64, 192), (64, 192), (128, 192), (128, 192), (128, 192)],
        [(64, 128), (64, 128), (128, 128), (64, 192), (128, 128)],
        [(64, 64), (64, 64), (128, 64), (128, 112), (128, 112)],
        [(64, 32), (64, 32), (64, 64), (64, 96), (128, 64)],
    ]


@given(m=st.integers(1, 4096), n=st.sampled_from((8, 512, 2112, 7168, 36864)), k=st.sampled_from((128, 1536, 7168)))
def test_weights_that_do_not_stay_in_l2_are_not_read_for_more_tiles_of_rows_than_need_be(m, n, k):
    block_m, block_n = plan.dense_tile(m, n, k, 132)
    assert (block_m, block_n) in itertools.product(plan.DENSE_TILE_M, plan.DENSE_TILE_N)
    if n * k > plan.L2_BYTES:
        assert block_m == (64 if m <= 64 else 128)


def test_dense_gemms_of_many_rows_stay_with_one_round_of_tiles():
    def source(m: int, n: int, output: plan.Output = plan.Output.BF16) -> str:
        return plan.dense_key(m, n, 7168, output, 132).source

    assert [source(m, 2112) for m in (257, 512, 1024)] == ["dense_gemm"] * 3
    assert [source(m, 36864) for m in (384, 385)] == ["dense_gemm", "grouped_gemm"]
    assert source(64, 2112, plan.Output.F32_DIRECT) == source(64, 2112, plan.Output.BF16_DIRECT) == "grouped_gemm"


@pytest.mark.parametrize(("pairs", "chunks"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (65536, 64), (131072, 128)])
def test_a_step_of_few_pairs_is_routed_in_one_launch(launched, pairs, chunks):
    route(torch.zeros(pairs, 1, dtype=torch.int32), EXPERTS, 128)
    assert plan.route_chunks(pairs) == chunks
    assert launched == {plan.route_key()} | ({plan.count_experts_key()} if chunks > 1 else set())


@pytest.mark.parametrize(("m", "n"), [(129, 8448), (129, 8456), (1040, 2112), (1040, 2120), (1, 24576)])
def test_tiles_of_other_results_are_narrow_where_these_are_one_round(m, n):
    narrow = len(plan.row_tiles(m, plan.PREFILL_BLOCK_M)) * -(-n // 128)
    key = plan.dense_key(m, n, 7168, plan.Output.F32_DIRECT, 132)
    assert dict(key.defines)["BLOCK_N"] == (128 if narrow <= 132 else 256)
