"""The bandwidth-bound kernels against their plain-torch references, on the same inputs and on poisoned scratch."""

import pytest
import torch

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.ops import per_token_group_quant_fp8, quantize, reference, silu_mul_quant_fp8
from fp8moe_plugin.plan.sm90.constants import PAIRS_PER_CHUNK
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from tests.helpers import Quantized, assert_same_routing, assert_same_tiles, poisoned, seeded, untouched
from tests.steps import (
    combine,
    copy_rows,
    empty_tokens,
    quantize_rows,
    quantize_rows_reference,
    quantize_tokens,
    route,
    route_reference,
    tiles_of_counts,
    tiles_of_groups,
    tiles_of_indices,
    tiles_of_runs,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
TOKENS = (0, 1, 63, 64, 65, 127, 129, 4096)
HIDDEN = (128, 256, 2048, 7168)
EXPERTS = (1, 3, 8, 64, 256, 384, 1023, 1024)
TILES = (FEW_ROWS, MANY_ROWS)
UE8M0 = (False, True)

tokens_and_hidden = pytest.mark.parametrize(("tokens", "hidden"), [(t, h) for t in TOKENS for h in HIDDEN])
both_scale_formats = pytest.mark.parametrize("ue8m0", UE8M0)


def activations(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values of very different sizes from row to row, with outliers of 1e4 and groups of zeros."""
    gen = seeded(seed, CUDA)
    x = torch.randn(*shape, generator=gen, device=CUDA)
    x *= torch.exp2(torch.randint(-20, 8, (*shape[:-1], 1), generator=gen, device=CUDA))
    kind = torch.rand(shape, generator=gen, device=CUDA)
    x = torch.where(kind < 1e-3, 1e4 * x.sign(), x)
    zero_groups = torch.rand(*shape[:-1], shape[-1] // 128, generator=gen, device=CUDA) < 0.05
    return x.masked_fill(zero_groups.repeat_interleave(128, -1), 0).bfloat16()


def random_slots(tokens: int, topk: int, missing: float, seed: int = 0) -> torch.Tensor:
    """Distinct rows below tokens * topk in any order, some of them -1."""
    gen = seeded(seed, CUDA)
    slots = torch.randperm(tokens * topk, generator=gen, device=CUDA).int().view(tokens, topk)
    return torch.where(torch.rand(tokens, topk, generator=gen, device=CUDA) < missing, -1, slots)


def random_ids(kind: str, tokens: int, topk: int, experts: int) -> torch.Tensor:
    gen = seeded(tokens + experts, CUDA)
    ids = torch.randint(0, experts, (tokens, topk), generator=gen, device=CUDA, dtype=torch.int32)
    drawn = torch.rand(tokens, topk, generator=gen, device=CUDA)
    match kind:
        case "one_expert":
            return torch.full_like(ids, experts // 2)
        case "empty_experts":
            return ids // 3 * 3
        case "missing":
            return torch.where(drawn < 0.3, -1, ids)
        case "skewed":
            return (experts * drawn**4).int()
        case "out_of_range":
            return torch.where(drawn < 0.2, experts, torch.where(drawn > 0.8, -7, ids))
        case "nowhere":
            return torch.full_like(ids, -1)
    return ids


def codes(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8).masked_fill(q.float() == 0, 0)  # the kernels do not keep the sign of a zero


def assert_same_quantized(actual: Quantized, expected: Quantized) -> None:
    assert torch.equal(codes(actual[0]), codes(expected[0]))
    assert torch.equal(actual[1].view(torch.int32), expected[1].view(torch.int32))


def ordered(q: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the e4m3 values, neighbours one apart."""
    codes = q.view(torch.uint8).int()
    magnitude = codes & 0x7F
    return torch.where(codes >= 0x80, -magnitude, magnitude)


# ---- quantize ----


@tokens_and_hidden
@both_scale_formats
def test_quantize_equals_the_reference_bit_by_bit(tokens: int, hidden: int, ue8m0: bool) -> None:
    x = activations(tokens, hidden)
    q, scales = per_token_group_quant_fp8(x, ue8m0=ue8m0)
    assert_same_quantized((q, scales), reference.quantize(x, ue8m0))
    assert tokens == 1 or scales.stride(0) == 1  # tokens are contiguous


def test_quantize_takes_more_than_two_dimensions() -> None:
    x = activations(3, 5, 384)
    assert_same_quantized(per_token_group_quant_fp8(x), reference.quantize(x))


@pytest.mark.parametrize("position", [0, 7, 8, 127])
def test_nan_spoils_its_own_group_only(position: int) -> None:
    x = activations(65, 384)
    x[3, 128 + position] = float("nan")
    q, scales = per_token_group_quant_fp8(x)
    expected_q, expected_scales = reference.quantize(x)
    assert torch.equal(q.isnan(), expected_q.isnan())
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    assert int(scales.isnan().sum()) == 1
    assert torch.equal(q.float().nan_to_num(), expected_q.float().nan_to_num())
    assert torch.equal(scales.nan_to_num(), expected_scales.nan_to_num())


@both_scale_formats
def test_a_nan_stays_nan(ue8m0: bool) -> None:
    x = activations(9, 256)
    x[4, 200] = float("nan")
    assert per_token_group_quant_fp8(x, ue8m0=ue8m0)[0][4, 200].isnan()


@both_scale_formats
def test_the_ends_of_the_bfloat16_range_equal_the_reference(ue8m0: bool) -> None:
    limits = torch.finfo(torch.bfloat16)
    x = activations(8, 128)
    for row, value in enumerate((limits.max, -limits.max, limits.tiny, 2.0**-133, 1e-10, 448.0, 449.0, -0.0)):
        x[row] = x[row].clamp(-abs(value), abs(value))
        x[row, row] = value
    assert_same_quantized(per_token_group_quant_fp8(x, ue8m0=ue8m0), reference.quantize(x, ue8m0))


def test_quantize_addresses_more_than_two_to_the_31_elements() -> None:
    tokens, hidden, edge = 300_001, 7168, 64
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=CUDA)
    x[-edge:] = activations(edge, hidden)
    q, scales = per_token_group_quant_fp8(x)
    expected_q, expected_scales = reference.quantize(x[-edge:])
    assert_same_quantized((q[-edge:], scales[-edge:]), (expected_q, expected_scales))
    assert not q[:-edge].view(torch.uint8).any()


@tokens_and_hidden
@pytest.mark.parametrize("topk", [1, 8, 17])
def test_quantized_rows_equal_the_reference_and_other_rows_are_not_written(tokens: int, hidden: int, topk: int) -> None:
    x, slots = activations(tokens, hidden), random_slots(tokens, topk, missing=0.2)
    expected = quantize_rows_reference(x, slots)
    assert_same_quantized(quantize_rows(x, slots), expected)
    assert_same_quantized(copy_rows(quantize.quantize_tokens(x, False), slots), expected)


@tokens_and_hidden
@both_scale_formats
def test_tokens_to_be_gathered_equal_the_reference(tokens: int, hidden: int, ue8m0: bool) -> None:
    x = activations(tokens, hidden)
    actual = empty_tokens(tokens, hidden, CUDA)
    torch.cuda.synchronize()
    quantize_tokens(x, actual, ue8m0)
    assert_same_quantized(actual, reference.quantize(x, ue8m0))


# ---- SiLU-and-mul ----


@both_scale_formats
@pytest.mark.parametrize("width", [128, 256, 2048])
@pytest.mark.parametrize(
    ("max_m", "counts"),
    [(1, [1]), (63, [63, 0, 1]), (65, [0, 65, 7, 64]), (129, [127, 128, 129, 500]), (4096, [4096]), (300, [0, 3] * 64)],
)
def test_silu_mul_quant_is_close_to_the_reference(max_m: int, counts: list[int], width: int, ue8m0: bool) -> None:
    gate_up = activations(len(counts), max_m, 2 * width).clamp(-1e3, 1e3)
    q, scales = silu_mul_quant_fp8(gate_up, torch.tensor(counts, dtype=torch.int32, device=CUDA), ue8m0)
    expected_q, expected_scales = reference.silu_mul_quant(gate_up, ue8m0)
    for group, count in enumerate(counts):
        written = (group, slice(0, count))
        torch.testing.assert_close(scales[written], expected_scales[written], rtol=1e-6, atol=0)
        distance = (ordered(q[written]) - ordered(expected_q[written])).abs()
        assert not distance.numel() or distance.max() <= 1
        assert distance.count_nonzero() <= max(2, 1e-4 * distance.numel())
        assert untouched(q[group, count:])
        assert (scales[group, count:].contiguous().view(torch.int32) == -1).all()


def test_silu_mul_quant_reads_no_row_past_the_count() -> None:
    gate_up = poisoned(2, 64, 512, dtype=torch.bfloat16, device=CUDA)
    gate_up[1, :9] = activations(9, 512)
    q, scales = silu_mul_quant_fp8(gate_up, torch.tensor([-3, 9], dtype=torch.int32, device=CUDA))
    assert untouched(q[0])
    assert untouched(q[1, 9:])
    assert scales[1, :9].isfinite().all()


@pytest.mark.parametrize("gate", [-200.0, -89.0, -88.0, 0.0, 88.0, 3e38])
def test_silu_of_large_gates_is_finite(gate: float) -> None:
    gate_up = torch.ones(1, 8, 256, dtype=torch.bfloat16, device=CUDA)
    gate_up[..., :128] = gate
    q, scales = silu_mul_quant_fp8(gate_up, torch.tensor([8], dtype=torch.int32, device=CUDA))
    expected = reference.silu_mul_quant(gate_up)
    assert torch.equal(q.float(), expected[0].float())
    torch.testing.assert_close(scales, expected[1], rtol=1e-6, atol=0)


# ---- combine ----


@tokens_and_hidden
@pytest.mark.parametrize("topk", [1, 6, 8, 9])
def test_combine_equals_the_reference(tokens: int, hidden: int, topk: int) -> None:
    rows = activations(max(1, tokens * topk), hidden)
    slots = random_slots(tokens, topk, missing=0.2)
    slots[: tokens // 8] = -1
    weights = torch.rand(tokens, topk, generator=seeded(1, CUDA), device=CUDA)
    out = poisoned(tokens, hidden, dtype=torch.bfloat16, device=CUDA)
    combine(rows, slots, weights, out)
    expected = reference.combine(rows[slots.clamp(min=0).long()], slots >= 0, weights, torch.empty_like(out))
    assert torch.equal(out, expected)


def test_combine_reads_no_row_without_a_slot() -> None:
    rows = poisoned(16, 256, dtype=torch.bfloat16, device=CUDA)
    rows[5] = 2.0
    slots = torch.tensor([[-1, 5], [-1, -1]], dtype=torch.int32, device=CUDA)
    out = poisoned(2, 256, dtype=torch.bfloat16, device=CUDA)
    combine(rows, slots, torch.full((2, 2), 0.5, device=CUDA), out)
    assert (out[0] == 1).all()
    assert (out[1] == 0).all()


# ---- route and the tile tables ----


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "kind", ["uniform", "skewed", "one_expert", "empty_experts", "missing", "out_of_range", "nowhere"]
)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("tokens", [*TOKENS, 1023, 1024, 1025])
def test_route_equals_the_reference(tokens: int, experts: int, kind: str, ids_dtype: torch.dtype) -> None:
    for topk in (1, 6, 8):
        ids = random_ids(kind, tokens, topk, experts).to(ids_dtype)
        for tile in TILES:
            assert_same_routing(route(ids, experts, tile), route_reference(ids, experts, tile))


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("chunks", [63, 64, 65, 130, 300])
def test_steps_of_many_chunks_are_routed_as_short_ones(chunks: int, experts: int) -> None:
    for tokens in (chunks * PAIRS_PER_CHUNK // 8, chunks * PAIRS_PER_CHUNK // 8 - 1):
        for kind in ("uniform", "skewed", "one_expert", "missing"):
            ids = random_ids(kind, tokens, 8, experts)
            assert_same_routing(route(ids, experts, MANY_ROWS), route_reference(ids, experts, MANY_ROWS))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("global_experts", "local_experts"), [(8, 1), (64, 16), (256, 32), (384, 384), (3000, MAX_LOCAL_EXPERTS)]
)
def test_route_keeps_the_experts_of_its_map(tokens: int, global_experts: int, local_experts: int) -> None:
    expert_map = torch.full((global_experts,), -1, dtype=torch.int32, device=CUDA)
    here = torch.randperm(global_experts, generator=seeded(tokens, CUDA), device=CUDA)[:local_experts]
    expert_map[here] = torch.arange(local_experts, dtype=torch.int32, device=CUDA)
    ids = random_ids("out_of_range", tokens, 8, global_experts)
    for tile in TILES:
        actual = route(ids, local_experts, tile, expert_map)
        assert_same_routing(actual, route_reference(ids, local_experts, tile, expert_map))


def test_int64_ids_are_not_cut_to_32_bits() -> None:
    ids = torch.tensor([[1, 2**32 + 1], [-(2**32), 0]], device=CUDA)
    assert route(ids, 4, FEW_ROWS).slots.tolist() == [[1, -1], [-1, 0]]
    expert_map = torch.tensor([1, 0, -1, -1], dtype=torch.int32, device=CUDA)
    assert route(ids, 2, FEW_ROWS, expert_map).slots.tolist() == [[0, -1], [-1, 1]]


def test_ids_need_no_alignment_beyond_their_own() -> None:
    ids = random_ids("uniform", 100, 1, 16)[1:]
    assert torch.equal(route(ids, 16, FEW_ROWS).slots, route_reference(ids, 16, FEW_ROWS).slots)


@pytest.mark.parametrize("tokens", [64, 1000])
def test_route_replays_in_a_graph_on_new_ids(tokens: int) -> None:
    ids = random_ids("missing", tokens, 8, 256)
    route(ids, 256, FEW_ROWS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route(ids, 256, FEW_ROWS)
    for kind in ("uniform", "one_expert", "nowhere"):
        ids.copy_(random_ids(kind, tokens, 8, 256))
        graph.replay()
        assert_same_routing(captured, route_reference(ids, 256, FEW_ROWS))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("experts", [*EXPERTS, 1100])
@pytest.mark.parametrize("max_m", [1, 64, 1000])
def test_tiles_of_counts_clamp_and_equal_the_reference(max_m: int, experts: int, tile: RowTile) -> None:
    counts = torch.randint(-5, max_m + 9, (experts,), generator=seeded(experts, CUDA), device=CUDA, dtype=torch.int32)
    clamped = counts.clamp(0, max_m).tolist()
    groups = [(g, g * max_m, g * max_m + c) for g, c in enumerate(clamped)]
    expected = tiles_of_groups(groups, tile, CUDA)
    assert_same_tiles(tiles_of_counts(counts, max_m, tile), expected)


@pytest.mark.parametrize("rows", [1, 31, 63, 64, 65, 1023, 1024, 1025, 4096, 2**20 - 1, 2**20])
@pytest.mark.parametrize("longest", [1, 3, 200, 50_000])
def test_tiles_of_indices_equal_the_reference(rows: int, longest: int) -> None:
    num_groups, gen = 8, seeded(rows, CUDA)
    lengths = torch.randint(1, longest + 1, (2 * rows // longest + 2,), generator=gen, device=CUDA)
    ids = torch.randint(-2, num_groups + 2, lengths.shape, generator=gen, device=CUDA, dtype=torch.int32)
    m_indices = torch.cat([ids.repeat_interleave(lengths), ids.new_full((rows,), 3)])[:rows].contiguous()
    expected = tiles_of_runs(m_indices, num_groups, MANY_ROWS)
    out = torch.ones(rows, 8, dtype=torch.bfloat16, device=CUDA)
    assert_same_tiles(tiles_of_indices(m_indices, num_groups, MANY_ROWS, out), expected)
    assert torch.equal(out[:, 0] == 0, (m_indices < 0) | (m_indices >= num_groups))
