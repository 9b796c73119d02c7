"""GEMM 1 with its activation in one kernel gives the same bits as GEMM, SiLU-and-mul and quantization in turn."""

import pytest
import torch

from fp8moe_plugin.ops.operands import empty_quantized
from fp8moe_plugin.ops.reference import dequantize_rows
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from tests import helpers as h
from tests.steps import (
    RoutingTensors,
    empty_tokens,
    gate_up,
    grouped_gemm,
    quantize_rows,
    quantize_tokens,
    route,
    split_k,
    tiles_of_counts,
)

pytestmark = pytest.mark.gpu
COUNTS = [
    [300, 1, 64, 65, 128, 0, 130],
    [7],
    [256, 256],
    [0, 0],
    [63, 2, 3, 4, 64, 64, 1, 9, 127],
    [144, 145, 129, 272, 288, 289, 136, 137],
]


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 128), (896, 384), (1024, 256), (2048, 640)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_one_kernel_gives_the_bits_of_three(counts: list[int], hidden: int, intermediate: int, ue8m0: bool) -> None:
    gen = h.seeded(0, torch.device("cuda", 0))
    max_m = max(*counts, 1) + 3
    a = h.random_quantized(gen, len(counts), max_m, hidden)
    w13 = h.random_weights(gen, len(counts), 2 * intermediate, hidden)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    tiles = tiles_of_counts(masked_m, max_m, MANY_ROWS)
    products = h.poisoned(len(counts), max_m, 2 * intermediate, dtype=torch.bfloat16, device=gen.device)
    grouped_gemm(a, w13, products, tiles)
    expected = silu_mul_quant_fp8(products, masked_m, ue8m0)
    for _ in range(2):
        actual = gate_up(a, w13, tiles, ue8m0=ue8m0)
        for group, count in enumerate(counts):
            for got, wanted in zip(actual, expected, strict=True):
                assert h.same_bits(got[group, :count], wanted[group, :count])
                assert h.untouched(got[group, count:])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 128), (896, 384), (2048, 640)])
@pytest.mark.parametrize("counts", [c for c in COUNTS if sum(c)], ids=str)
@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
def test_rows_found_among_the_tokens_give_the_bits_of_copies(
    tile: RowTile, counts: list[int], hidden: int, intermediate: int, ue8m0: bool
) -> None:
    gen = h.seeded(1, torch.device("cuda", 0))
    w13 = h.random_weights(gen, len(counts), 2 * intermediate, hidden)
    x, routing = tokens_of(counts, hidden, tile, gen)
    q, scales = quantize_rows(x, routing.slots, ue8m0)
    products = h.poisoned(1, len(q), 2 * intermediate, dtype=torch.bfloat16, device=gen.device)
    grouped_gemm((q[None], scales[None]), w13, products, routing.tiles)
    expected = silu_mul_quant_fp8(products, routing.num_rows, ue8m0)
    quantized = empty_tokens(*x.shape, x.device)
    torch.cuda.synchronize()
    quantize_tokens(x, quantized, ue8m0)
    actual = gate_up(quantized, w13, routing.tiles, ue8m0=ue8m0, tokens=routing.tokens)
    for got, wanted in zip(actual, expected, strict=True):
        assert h.same_bits(got[0, : sum(counts)], wanted[0, : sum(counts)])


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("counts", [[1], [3, 0, 64, 130], [5] * 200], ids=str)
def test_splits_of_k_change_the_roundings_of_sums_and_nothing_else(counts: list[int], splits: int) -> None:
    gen, (hidden, intermediate) = h.seeded(2, torch.device("cuda", 0)), (1024, 384)
    w13 = h.random_weights(gen, len(counts), 2 * intermediate, hidden)
    x, routing = tokens_of(counts, hidden, FEW_ROWS, gen)
    quantized, rows, device = empty_tokens(*x.shape, x.device), sum(counts), x.device
    torch.cuda.synchronize()
    quantize_tokens(x, quantized)
    expected = gate_up(quantized, w13, routing.tiles, tokens=routing.tokens)
    first = None
    for _ in range(10):
        q, scales = empty_quantized(routing.tokens.numel(), intermediate, device)
        q.view(torch.uint8).fill_(0x7F), scales.fill_(float("nan"))
        split, tiles = split_k(splits, routing.tiles, routing.tokens.numel(), intermediate)
        gate_up(quantized, w13, tiles, tokens=routing.tokens, split=split, out=(q, scales))
        got, wanted = (dequantize_rows(*(p[:rows] for p in pair)) for pair in ((q, scales), (e[0] for e in expected)))
        assert h.relative_l2(got, wanted.double()) <= 5e-3
        first = got if first is None else first
        assert torch.equal(got, first)
    assert routing.tiles.num_tiles[1:].tolist() == [0, 0, 0, 0]


def tokens_of(
    counts: list[int], hidden: int, tile: RowTile, gen: torch.Generator
) -> tuple[torch.Tensor, RoutingTensors]:
    """Random tokens that give each expert this many rows, and their routing."""
    rows, device = sum(counts), gen.device
    ids = torch.arange(len(counts), dtype=torch.int32, device=device)
    ids = ids.repeat_interleave(torch.tensor(counts, device=device))[torch.randperm(rows, generator=gen, device=device)]
    ids = torch.nn.functional.pad(ids, (0, -rows % 4), value=-1).view(-1, 4)  # a token may pick an expert twice
    return h.random_tokens(gen, len(ids), hidden), route(ids, len(counts), tile)
