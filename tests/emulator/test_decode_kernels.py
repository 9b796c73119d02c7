"""The kernels of few rows an expert on the emulator: GEMM 1 gathers, blocks share a tile, weights are loaded ahead."""

import pytest
import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS
from tests import helpers as h
from tests.emulator.device import Device
from tests.emulator.inputs import (
    Slabs,
    assert_counters_at_zero,
    assert_product,
    empty_rows,
    exact,
    slabs,
)
from tests.steps import SplitK, TileTensors, gate_up, grouped_gemm, split_k, tiles_of_counts

CPU = torch.device("cpu")
TOKENS = 40
RAGGED = [8, 1, 16, 0, 33, 65]
SKEWED = [0, 130, 1, 0]
seeds = pytest.mark.parametrize("seed", [1, 2])
some_counts = pytest.mark.parametrize("counts", [RAGGED, SKEWED, [0, 0]], ids=["ragged", "skewed", "none"])


def some_tokens(gen: torch.Generator, rows: Slabs) -> torch.Tensor:
    """int32 `[G, max_m]`, the token of each row that is there; of the others none."""
    tokens = torch.randint(TOKENS, (len(rows.counts), rows.max_m), generator=gen, dtype=torch.int32)
    there = torch.arange(rows.max_m) < rows.masked_m[:, None]
    return torch.where(there, tokens, 2**30)


def split_gate_up(
    x: Quantized, w13: Quantized, tiles: TileTensors, tokens: torch.Tensor, splits: int
) -> tuple[Quantized, TileTensors, SplitK]:
    """`gate_up` of these tokens by `splits` blocks a tile; and the tiles with its counters."""
    split, counted = split_k(splits, tiles, tokens.numel(), w13[0].shape[1] // 2)
    return gate_up(x, w13, counted, tokens=tokens, split=split), counted, split


@seeds
@some_counts
@pytest.mark.parametrize(
    ("hidden", "intermediate", "splits"),
    [(128, 256, 1), (768, 128, 1), (1024, 128, 1), (256, 384, 2), (512, 256, 4), (1024, 128, 4)],
)
def test_gathered_rows_copies_and_splits_of_k_have_the_same_bits(
    emulator: Device, counts: list[int], hidden: int, intermediate: int, splits: int, seed: int
) -> None:
    gen = h.seeded(seed, CPU)
    rows, x = slabs(gen, counts, hidden), exact(gen, TOKENS, hidden)
    w13 = exact(gen, len(counts), 2 * intermediate, hidden, rows_of_scale=GROUP)
    tokens = some_tokens(gen, rows)
    copies = x[0][tokens.long() % TOKENS], x[1][tokens.long() % TOKENS]
    products = empty_rows(rows, 2 * intermediate)

    def ops() -> tuple[Quantized, Quantized, Quantized, TileTensors, SplitK]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, FEW_ROWS)
        grouped_gemm(copies, w13, products, tiles)
        expected, of_copies = silu_mul_quant_fp8(products, rows.masked_m), gate_up(copies, w13, tiles)
        return expected, of_copies, *split_gate_up(x, w13, tiles, tokens, splits)

    expected, of_copies, actual, tiles, _ = emulator.execute(seed, ops)
    for group, count in enumerate(counts):
        for got, wanted in zip((*actual, *of_copies), expected * 2, strict=True):
            assert h.same_bits(got[group, :count], wanted[group, :count]), f"expert {group}"
            assert h.untouched(got[group, count:]), f"expert {group}"
    assert tiles.done_counters is not None
    counters = tiles.done_counters[1:].unflatten(0, (len(tiles.table), -1))[: int(tiles.num_tiles[0])]
    assert set(counters[:, 0].tolist()) <= {intermediate // GROUP}  # columns that are done
    assert set(counters[:, 1:].flatten().tolist()) <= {splits}
    assert_counters_at_zero(tiles)


@seeds
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("intermediate", [128, 768, 896])  # 896: the next tile is claimed in the first step
def test_the_second_gemm_may_load_weights_while_the_first_one_runs(
    emulator: Device, intermediate: int, splits: int, seed: int
) -> None:
    gen, n = h.seeded(seed, CPU), 200
    rows, x = slabs(gen, RAGGED, 256), exact(gen, TOKENS, 256)
    w13 = exact(gen, len(RAGGED), 2 * intermediate, 256, rows_of_scale=GROUP)
    w2, out, tokens = h.random_weights(gen, len(RAGGED), n, intermediate), empty_rows(rows, n), some_tokens(gen, rows)

    def ops() -> tuple[TileTensors, Quantized]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, FEW_ROWS)
        inner, tiles, split = split_gate_up(x, w13, tiles, tokens, splits)
        grouped_gemm(inner, w2, out, tiles, after_gate_up=True, row_counters=split.counters)
        return tiles, inner

    tiles, inner = emulator.execute(seed, ops)
    assert_product(out, rows, inner, w2)
    assert_counters_at_zero(tiles)
