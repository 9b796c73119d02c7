"""The kernels of few rows an expert on the emulator: GEMM 1 gathers, blocks share a tile, weights are loaded ahead."""

from dataclasses import replace

import pytest
import torch

from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.ops import gemm_launch
from fp8moe_plugin.ops.gemm_launch import Rows, TileAddresses, Weights
from fp8moe_plugin.ops.grouped_gemm import grouped_gemm
from fp8moe_plugin.ops.quantize import Quantized, empty_quantized
from fp8moe_plugin.ops.route import Tiles, tiles_of_counts
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8
from fp8moe_plugin.plan import DECODE_BLOCK_M, tile_counters
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
    emulator: Device, x: Quantized, w13: Quantized, tiles: Tiles, tokens: torch.Tensor, splits: int
) -> tuple[Quantized, torch.Tensor]:
    """`gate_up` of these tokens by `splits` blocks a tile; and its counters, int32 `[1 + row tiles * counters]`."""
    width, (groups, max_m) = w13[0].shape[1], tokens.shape
    q, scales = empty_quantized(tokens.numel(), width // 2, CPU)
    partial = h.poisoned(splits, tokens.numel(), width, dtype=torch.float32, device=CPU)
    ready = torch.zeros(1 + len(tiles.table) * tile_counters(width // 2, splits), dtype=torch.int32)
    launched = gemm_launch.gate_up_few_rows_launch(
        Rows.of(x[0], (x[1], 0, 0)),
        tokens.data_ptr(),
        Weights.of(w13),
        Rows.of(q, (scales, 0, 0)),
        TileAddresses.of(replace(tiles, ready=ready)),
        (partial.data_ptr(), splits),
        ue8m0=False,
        device_index=0,
    )
    emulator.launch(*launched)
    return (q.view(groups, max_m, -1), scales.unflatten(0, (groups, max_m))), ready


@seeds
@some_counts
@pytest.mark.parametrize(
    ("hidden", "intermediate", "splits"),
    [(128, 256, 1), (768, 128, 1), (1024, 128, 1), (256, 384, 2), (512, 256, 4), (1024, 128, 4)],
)
def test_gathered_rows_and_splits_of_k_give_the_bits_of_copies(
    emulator: Device, counts: list[int], hidden: int, intermediate: int, splits: int, seed: int
) -> None:
    gen = h.seeded(seed, CPU)
    rows, x = slabs(gen, counts, hidden), exact(gen, TOKENS, hidden)
    w13 = exact(gen, len(counts), 2 * intermediate, hidden, rows_of_scale=GROUP)
    tokens = some_tokens(gen, rows)
    copies = x[0][tokens.long() % TOKENS], x[1][tokens.long() % TOKENS]
    products = empty_rows(rows, 2 * intermediate)

    def ops() -> tuple[Tiles, Quantized, Quantized, torch.Tensor]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, DECODE_BLOCK_M)
        grouped_gemm(copies, w13, products, tiles)
        expected = silu_mul_quant_fp8(products, rows.masked_m)
        return tiles, expected, *split_gate_up(emulator, x, w13, tiles, tokens, splits)

    tiles, expected, actual, ready = emulator.execute(seed, ops)
    for group, count in enumerate(counts):
        for got, wanted in zip(actual, expected, strict=True):
            assert h.same_bits(got[group, :count], wanted[group, :count]), f"expert {group}"
            assert h.untouched(got[group, count:]), f"expert {group}"
    counters = ready[1:].unflatten(0, (len(tiles.table), -1))[: int(tiles.num_tiles[0])]
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

    def ops() -> tuple[Tiles, Quantized]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, DECODE_BLOCK_M)
        inner, ready = split_gate_up(emulator, x, w13, tiles, tokens, splits)
        operands = Rows.of(inner[0], gemm_launch._k_major(*inner)), Weights.of(w2), out.data_ptr()
        told = TileAddresses.of(replace(tiles, ready=ready)), 0, True, tile_counters(intermediate, splits)
        emulator.launch(*gemm_launch.grouped_launch(*operands, DECODE_BLOCK_M, *told))
        return tiles, inner

    tiles, inner = emulator.execute(seed, ops)
    assert_product(out, rows, inner, w2)
    assert_counters_at_zero(tiles)
