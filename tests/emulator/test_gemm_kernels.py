"""The GEMM kernels, launched by their ops, on the emulator."""

from dataclasses import replace

import pytest
import torch

from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from fp8moe_plugin.plan.tuning import EARLY_BELOW
from tests import helpers as h
from tests.emulator.conftest import MULTIPROCESSORS
from tests.emulator.device import Device
from tests.emulator.inputs import Slabs, assert_counters_at_zero, assert_product, empty_rows, slabs
from tests.steps import (
    TileTensors,
    empty_tokens,
    gate_up,
    grouped_gemm,
    quantize_rows,
    quantize_tokens,
    route,
    tiles_of_counts,
)

CPU = torch.device("cpu")
SHORT = [8, 1, 16, 0, 33, 64, 65]
LONG = [144, 130, 64, 1, 0, 300]
MANY = [520, 130, 0, 64, 721, 1]  # 4, 1, 0, 1, 6 and 1 row tiles
seeds = pytest.mark.parametrize("seed", [1, 2])


def multiply(emulator: Device, rows: Slabs, b: Quantized, tile: RowTile, seed: int) -> tuple[torch.Tensor, TileTensors]:
    out = empty_rows(rows, b[0].shape[1])

    def ops() -> TileTensors:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, tile)
        grouped_gemm(rows.a, b, out, tiles)
        return tiles

    return out, emulator.execute(seed, ops)


@seeds
@pytest.mark.parametrize(
    ("counts", "tile", "n", "k"),
    [
        (SHORT, FEW_ROWS, 200, 128),
        (SHORT, FEW_ROWS, 256, 256),
        (SHORT, FEW_ROWS, 200, 768),  # tiles in fixed order
        (SHORT, FEW_ROWS, 128, 896),  # claimed, in the first step of the tile before
        (SHORT, FEW_ROWS, 384, 1024),
        ([0, 0], FEW_ROWS, 128, 128),
        (LONG, MANY_ROWS, 512, 128),
        (LONG, MANY_ROWS, 256, 256),
        (LONG, MANY_ROWS, 200, 512),
        (LONG, MANY_ROWS, 256, 896),
        (LONG, MANY_ROWS, 384, 1024),
        ([0, 0], MANY_ROWS, 256, 128),
    ],
)
def test_the_product_is_that_of_the_operands(
    emulator: Device, counts: list[int], tile: RowTile, n: int, k: int, seed: int
) -> None:
    gen = h.seeded(seed, CPU)
    rows, b = slabs(gen, counts, k), h.random_weights(gen, len(counts), n, k)
    out, tiles = multiply(emulator, rows, b, tile, seed)
    assert_product(out, rows, rows.a, b)
    assert_counters_at_zero(tiles)


@seeds
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (1024, 256)])
def test_one_kernel_gives_the_bits_of_three(emulator: Device, hidden: int, intermediate: int, seed: int) -> None:
    gen = h.seeded(seed, CPU)
    rows, w13 = slabs(gen, LONG, hidden), h.random_weights(gen, len(LONG), 2 * intermediate, hidden)
    products = empty_rows(rows, 2 * intermediate)

    def ops() -> tuple[Quantized, Quantized]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS)
        grouped_gemm(rows.a, w13, products, tiles)
        return silu_mul_quant_fp8(products, rows.masked_m), gate_up(rows.a, w13, tiles)

    expected, actual = emulator.execute(seed, ops)
    for group, count in enumerate(LONG):
        for got, wanted in zip(actual, expected, strict=True):
            assert h.same_bits(got[group, :count], wanted[group, :count])
            assert h.untouched(got[group, count:])


@seeds
@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 256), (640, 128)])
def test_rows_found_among_the_tokens_give_the_bits_of_copies(
    emulator: Device, hidden: int, intermediate: int, tile: RowTile, seed: int
) -> None:
    gen, experts = h.seeded(seed, CPU), 3
    x, w13 = h.random_tokens(gen, 150, hidden), h.random_weights(gen, experts, 2 * intermediate, hidden)
    _, ids = h.random_routing(gen, "some_missing", len(x), 2, experts)
    quantized = empty_tokens(len(x), hidden, CPU)
    products = h.poisoned(1, ids.numel(), 2 * intermediate, dtype=torch.bfloat16, device=CPU)

    def ops() -> tuple[torch.Tensor, Quantized, Quantized]:
        routing = route(ids, experts, tile)
        quantize_tokens(x, quantized)
        q, scales = quantize_rows(x, routing.slots)
        grouped_gemm((q[None], scales[None]), w13, products, routing.tiles)
        copies = silu_mul_quant_fp8(products, routing.num_rows)
        found = gate_up(quantized, w13, routing.tiles, tokens=routing.tokens)
        return routing.num_rows, copies, found

    rows, expected, actual = emulator.execute(seed, ops)
    for got, wanted in zip(actual, expected, strict=True):
        assert h.same_bits(got[0, :rows], wanted[0, :rows])
        assert h.untouched(got[0, rows:])


@seeds
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("intermediate", [128, 256, 512, 1024])
def test_the_second_gemm_of_experts_may_start_while_the_first_one_ends(
    emulator: Device, gathered: bool, intermediate: int, seed: int
) -> None:
    gen, n = h.seeded(seed, CPU), 384
    rows = slabs(gen, LONG, 128)
    w13, w2 = (h.random_weights(gen, len(LONG), *shape) for shape in ((2 * intermediate, 128), (n, intermediate)))
    out = empty_rows(rows, n)
    a, tokens = rows.a, None
    if gathered:
        tokens = torch.arange(len(LONG) * rows.max_m, dtype=torch.int32)
        a = a[0].flatten(0, 1), a[1].flatten(0, 1).contiguous()

    def ops() -> tuple[TileTensors, Quantized]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS)
        inner = gate_up(a, w13, tiles, tokens=tokens)
        q, scales = (part.flatten(0, 1).unflatten(0, out.shape[:2]) for part in inner)
        grouped_gemm((q, scales), w2, out, tiles, after_gate_up=True)
        return tiles, (q, scales)

    tiles, inner = emulator.execute(seed, ops)
    assert_product(out, rows, inner, w2)
    assert_counters_at_zero(tiles)
    assert tiles.done_counters is not None
    done, *stored = tiles.done_counters[: 1 + int(tiles.num_tiles[0])].tolist()
    assert done == 2 * MULTIPROCESSORS
    assert set(stored) == {2 * intermediate // 128}


@seeds
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("intermediate", [128, 256])
def test_the_second_gemm_of_narrow_experts_keeps_weights(
    emulator: Device, intermediate: int, pdl: bool, seed: int
) -> None:
    """13 row tiles under 3 columns: some runs of 4 are of one column, some of two, and of the last 3 are there."""
    gen, n = h.seeded(seed, CPU), 600
    rows = slabs(gen, MANY, 128)
    w13, w2 = (h.random_weights(gen, len(MANY), *shape) for shape in ((2 * intermediate, 128), (n, intermediate)))
    out = empty_rows(rows, n)

    def ops() -> tuple[TileTensors, Quantized]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS).for_experts(EARLY_BELOW, intermediate)
        assert tiles.keep_b
        if not pdl:  # then in fixed order
            tiles = replace(tiles, done_counters=None)
        inner = gate_up(rows.a, w13, tiles)
        grouped_gemm(inner, w2, out, tiles, after_gate_up=True)
        return tiles, inner

    tiles, inner = emulator.execute(seed, ops)
    assert tiles.num_tiles[0] == 13
    assert_product(out, rows, inner, w2)
    assert_counters_at_zero(tiles)
