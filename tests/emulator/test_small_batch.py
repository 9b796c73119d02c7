"""Layers of a few tokens on the emulator: two kernels of clusters, the second one beside the first."""

import ctypes
from dataclasses import replace

import pytest
import torch

from fp8moe_plugin.ops import fused_moe, workspace
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.plan.sm90 import layer as sm90_layer
from fp8moe_plugin.plan.sm90.constants import SMALL_BATCH_PAIRS
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, small_batch_step
from fp8moe_plugin.plan.spec import LayerSpec
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import SHARED_BYTES, Device
from tests.emulator.layers import MOST_ERROR, run_layers, run_packed_layer

MULTIPROCESSORS = 24  # two or three clusters of the first GEMM
TOPK = 3
ROUNDING = 0.0019  # relative L2: a result that is rounded to bfloat16 once is off by 0.0017, twice by 0.0024
CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])


@pytest.fixture
def emulator(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> Device:
    return Device(emulator_runtime, kernels, MULTIPROCESSORS, SHARED_BYTES)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    h.force_step(monkeypatch, width=8)


def force_down_splits(patch: pytest.MonkeyPatch, width: int, splits: int) -> None:
    """Layers are small batches of up to `width` tokens, and `splits` blocks share channels of GEMM 2."""

    def plan(spec: LayerSpec, tokens: int, multiprocessors: int) -> SmallBatchStep:
        return replace(small_batch_step(spec, tokens, width, multiprocessors), down_splits=splits)

    h.force_layer(patch, plan)


@pytest.mark.parametrize(
    ("shape", "kind", "seed"),
    h.pairwise(
        [(1, 256, 128), (3, 1152, 256), (8, 512, 384), (9, 256, 256), (16, 1152, 128)],
        ["distinct", "some_missing", "one_expert", "nowhere"],
        [1, 2],
    ),
)
def test_the_layer(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], kind: str, seed: int
) -> None:
    tokens, hidden, intermediate = shape
    h.force_step(monkeypatch, width=8 if tokens <= 8 else 16)
    gen, experts = h.seeded(seed, CPU), 5
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, intermediate)
    weights, ids = h.random_routing(gen, kind, tokens, TOPK, experts)
    out = emulator.execute(seed, lambda: fused_moe(x, *layer, weights, ids))
    expected = h.layer_reference(x, layer, weights, ids, quantized=True)
    if kind == "nowhere":
        assert (out == 0).all()
    else:
        assert h.relative_l2(out, expected) <= MOST_ERROR


@pytest.mark.parametrize("small", [True, False])
def test_a_small_batch_sums_rows_before_they_are_rounded(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Therefore tokens that arrive quantized, which have no small batches, have other low-order bits."""
    h.force_step(monkeypatch, width=8 * small)
    gen, experts = h.seeded(1, CPU), 4
    x, layer = h.random_tokens(gen, 3, 256), h.random_layer(gen, experts, 256, 128)
    routing = h.random_routing(gen, "distinct", 3, TOPK, experts)
    out = emulator.execute(1, lambda: fused_moe(x, *layer, *routing))
    errors = {
        r: h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True, rounds_rows=r)) for r in (0, 1)
    }
    assert errors[not small] < ROUNDING < errors[small]


@pytest.mark.parametrize(  # twice the shared memory: room for more than one layer
    ("shape", "shared_bytes", "seed"), h.pairwise([(2, 8), (11, 16)], [SHARED_BYTES, 2 * SHARED_BYTES], [1, 2])
)
def test_layers_that_share_their_scratch(
    emulator_runtime: ctypes.CDLL, kernels: Kernels, shape: tuple[int, int], shared_bytes: int, seed: int
) -> None:
    tokens, width = shape
    emulator = Device(emulator_runtime, kernels, MULTIPROCESSORS, shared_bytes)
    errors = run_layers(emulator, seed, tokens, 384, 128, small_batch=width)
    assert max(errors) <= MOST_ERROR, f"relative L2 of each layer: {errors}"


@seeds
def test_where_no_multiprocessor_has_room_for_both_kernels(
    emulator_runtime: ctypes.CDLL, kernels: Kernels, seed: int
) -> None:
    emulator = Device(emulator_runtime, kernels, MULTIPROCESSORS, 130 * 1024)
    assert max(run_layers(emulator, seed, 3, 256, 128, small_batch=8)) <= MOST_ERROR


@pytest.mark.parametrize(("splits", "hidden", "tokens"), h.pairwise([1, 2, 3, 5, 8], [128, 384], [3, 16]))
def test_channels_are_shared_by_any_number_of_blocks(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, hidden: int, splits: int, tokens: int
) -> None:
    force_down_splits(monkeypatch, 8 if tokens <= 8 else 16, splits)
    gen, experts = h.seeded(splits, CPU), 5
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, 384)
    routing = h.random_routing(gen, "some_missing", tokens, TOPK, experts)
    out = emulator.execute(1, lambda: fused_moe(x, *layer, *routing))
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True)) <= MOST_ERROR


@pytest.mark.parametrize(  # both experts have units: of one team or none in some blocks, more than stages in others
    ("splits", "intermediate", "tokens", "biased"),
    [(1, 128, 5, True), (1, 896, 16, True), (2, 128, 8, False), (3, 640, 5, False), (5, 128, 16, True)],
)
def test_teams_share_channels_of_packed_experts(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, splits: int, intermediate: int, tokens: int, biased: bool
) -> None:
    force_down_splits(monkeypatch, 8 if tokens <= 8 else 16, splits)
    assert run_packed_layer(emulator, 1, tokens, SPAN, 256, intermediate, biased) <= MOST_ERROR


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stages", [0, 1, 5, 1000])  # no block loads as many as 1000
def test_results_do_not_depend_on_when_gemm_2_starts(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, narrow: None, stages: int, packed: bool
) -> None:
    monkeypatch.setattr(sm90_layer, "STAGES_BEFORE_DOWN", stages)
    monkeypatch.setattr(sm90_layer, "PACKED_STAGES_BEFORE_DOWN", stages)
    monkeypatch.setattr(sm90_layer, "PACKED_UNDELAYED_TILES", 0)
    if packed:
        assert run_packed_layer(emulator, 1, 5, SPAN, 384, 512) <= MOST_ERROR
    else:
        assert max(run_layers(emulator, 1, 5, 384, 512, small_batch=8)) <= MOST_ERROR


def test_as_many_experts_and_pairs_as_the_list_holds(emulator: Device, narrow: None) -> None:
    gen, experts, tokens = h.seeded(0, CPU), 70, 8
    x, layer = h.random_tokens(gen, tokens, 128), h.random_layer(gen, experts, 128, 128)
    routing = h.random_routing(gen, "distinct", tokens, SMALL_BATCH_PAIRS // tokens, experts)
    out = emulator.execute(1, lambda: fused_moe(x, *layer, *routing))
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True)) <= MOST_ERROR


def test_power_of_two_scales(emulator: Device, narrow: None) -> None:
    gen, experts = h.seeded(0, CPU), 5
    x, layer = h.random_tokens(gen, 5, 256), h.random_layer(gen, experts, 256, 128)
    routing = h.random_routing(gen, "distinct", 5, TOPK, experts)
    out = emulator.execute(1, lambda: fused_moe(x, *layer, *routing, ue8m0=True))
    expected = h.layer_reference(x, layer, *routing, quantized=True, ue8m0=True)
    assert h.relative_l2(out, expected) <= MOST_ERROR
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True)) > MOST_ERROR


def test_nan_in_one_token_stays_in_that_token(emulator: Device, narrow: None) -> None:
    gen, experts, row = h.seeded(0, CPU), 5, 2
    x, layer = h.random_tokens(gen, 5, 256), h.random_layer(gen, experts, 256, 256)
    routing = h.random_routing(gen, "distinct", 5, TOPK, experts)
    clean = emulator.execute(1, lambda: fused_moe(x, *layer, *routing))
    x[row, 200] = float("nan")
    broken = emulator.execute(2, lambda: fused_moe(x, *layer, *routing))
    assert broken[row].isnan().all()
    broken[row] = clean[row]
    assert h.same_bits(broken, clean)


def test_ids_of_64_bits_are_mapped_to_local_experts(emulator: Device, narrow: None) -> None:
    """Two ids may be of one local expert; none is taken for another that has the same lower half, or lower bits."""
    gen, tokens = h.seeded(0, CPU), 6
    expert_map = torch.tensor([-1, 2, 0, -1, 1, 2, 9], dtype=torch.int32)  # 9: there is none
    ids = torch.randint(0, 7, (tokens, TOPK), generator=gen)
    ids[0], ids[1] = torch.tensor([1, 5, 2]), torch.tensor([2**32 + 1, -(2**32) + 4, 2**63 - 1])
    ids[2] = torch.tensor([-1, 7, 4])
    here = (ids >= 0) & (ids < len(expert_map))
    local = torch.where(here, expert_map[ids.where(here, 0)], -1)
    assert (local[1] == -1).all()
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, 3, 256, 128)
    weights = torch.rand(tokens, TOPK, generator=gen)
    weights[(local < 0) | (local >= 3)] = float("nan")  # not read
    mapped = emulator.execute(1, lambda: fused_moe(x, *layer, weights, ids, expert_map=expert_map))
    plain = emulator.execute(2, lambda: fused_moe(x, *layer, weights, local.int()))
    assert h.same_bits(mapped, plain)
    assert h.relative_l2(plain, h.layer_reference(x, layer, weights, local, quantized=True)) <= MOST_ERROR


@pytest.mark.parametrize(("tokens", "ids_64"), [(3, False), (8, True), (11, False)])
def test_a_shared_expert_is_one_more_column(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, tokens: int, ids_64: bool
) -> None:
    h.force_step(monkeypatch, width=8 if tokens <= 8 else 16)
    gen, experts = h.seeded(0, CPU), 6
    x, layer = h.random_tokens(gen, tokens, 512), h.random_layer(gen, experts, 512, 256)
    weights, ids = h.random_routing(gen, "out_of_range", tokens, TOPK, experts)
    ids = ids.long() if ids_64 else ids
    out = emulator.execute(1, lambda: fused_moe(x, *layer, weights, ids, shared_expert=True, routed_scale=2.5))
    columns = h.with_shared_expert(weights, ids, experts, 2.5)
    assert h.same_bits(out, emulator.execute(2, lambda: fused_moe(x, *layer, *columns)))
    assert h.relative_l2(out, h.layer_reference(x, layer, *columns, quantized=True)) <= MOST_ERROR


@pytest.mark.parametrize(
    ("broken", "weight"),
    [("w13", 0.5), ("w13_scale", 0.0), ("w2", 0.5), ("w2", 0.0), ("w2_scale", -0.0), ("router", 0.5)],
)
def test_nan_of_an_expert_stays_with_the_tokens_that_have_it(
    emulator: Device, narrow: None, broken: str, weight: float
) -> None:
    """Also where the router's weight is 0, of either sign: 0 times NaN is NaN."""
    gen, experts, tokens = h.seeded(0, CPU), 5, 6
    x, layer = h.random_tokens(gen, tokens, 256), h.random_layer(gen, experts, 256, 256)
    weights, ids = h.random_routing(gen, "distinct", tokens, TOPK, experts)
    own = ids == 1
    has = own.any(-1)
    assert 0 < has.sum() < tokens
    weights[own] = weight
    clean = emulator.execute(1, lambda: fused_moe(x, *layer, weights, ids))
    if broken == "router":
        weights[own] = float("nan")
    else:
        h.bits(getattr(layer, broken))[1] = h.bits(torch.full((), float("nan")).to(getattr(layer, broken).dtype))
    spoiled = emulator.execute(2, lambda: fused_moe(x, *layer, weights, ids))
    assert spoiled[has].isnan().all()
    assert h.same_bits(spoiled[~has], clean[~has])


def test_what_is_left_in_the_scratch_is_not_read(
    emulator: Device, narrow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gen, experts = h.seeded(0, CPU), 5
    x, layer = h.random_tokens(gen, 6, 256), h.random_layer(gen, experts, 256, 256)
    routing = h.random_routing(gen, "some_missing", 6, TOPK, experts)
    outs = []
    for left in (0, 0xFF):  # the latter: NaN
        monkeypatch.setattr(
            workspace, "scratch", lambda nbytes, _, left=left: torch.full((nbytes,), left, dtype=torch.uint8)
        )
        outs.append(emulator.execute(1, lambda: fused_moe(x, *layer, *routing)))
    assert h.same_bits(*outs)
