"""Weights with one scale for each row, in each kernel that reads weights, on the emulator against float64."""

import pytest
import torch

from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.plan.sm90.dense import few_rows
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, RowTile
from fp8moe_plugin.plan.tuning import EARLY_BELOW
from tests import helpers as h
from tests.emulator.activations import CPU, OF_EXPERTS
from tests.emulator.device import Device
from tests.emulator.inputs import assert_product, empty_rows, slabs
from tests.emulator.layers import MOST_ERROR, run_dense_layer
from tests.steps import TileTensors, gate_up, grouped_gemm, tiles_of_counts

SHORT = [8, 1, 16, 0, 33, 64, 65]
LONG = [144, 130, 64, 1, 0, 300]
CLAMPED = h.MODIFIED[0]  # everywhere: other activations would be other kernels, which take long to compile
seeds = pytest.mark.parametrize("seed", [1, 2])


def weights(gen: torch.Generator, *shape: int) -> Quantized:
    return h.random_weights(gen, *shape, weights=FP8_CHANNEL)


@seeds
@pytest.mark.parametrize(
    ("counts", "tile", "n", "k"),
    [
        (SHORT, FEW_ROWS, 256, 128),
        (SHORT, FEW_ROWS, 384, 896),
        (LONG, MANY_ROWS, 512, 128),  # tiles of one stage: the next ones begin while sums are scaled
        (LONG, MANY_ROWS, 384, 1024),  # the last tile passes N
    ],
)
def test_the_product_is_that_of_the_operands(
    emulator: Device, counts: list[int], tile: RowTile, n: int, k: int, seed: int
) -> None:
    gen = h.seeded(seed, CPU)
    rows, b = slabs(gen, counts, k), weights(gen, len(counts), n, k)
    out = empty_rows(rows, n)
    emulator.execute(seed, lambda: grouped_gemm(rows.a, b, out, tiles_of_counts(rows.masked_m, rows.max_m, tile)))
    assert_product(out, rows, rows.a, b)


@seeds
def test_the_second_gemm_keeps_weights(emulator: Device, seed: int) -> None:
    gen, counts, n = h.seeded(seed, CPU), [520, 130, 0, 64], 600
    rows, w13, w2 = slabs(gen, counts, 128), weights(gen, 4, 256, 128), weights(gen, 4, n, 128)
    out = empty_rows(rows, n)

    def ops() -> tuple[TileTensors, Quantized]:
        tiles = tiles_of_counts(rows.masked_m, rows.max_m, MANY_ROWS).for_experts(EARLY_BELOW, 128)
        inner = gate_up(rows.a, w13, tiles, activation=CLAMPED)
        grouped_gemm(inner, w2, out, tiles, after_gate_up=True)
        return tiles, inner

    tiles, inner = emulator.execute(seed, ops)
    assert tiles.keep_b
    assert_product(out, rows, inner, w2)


@pytest.mark.parametrize("kernel", OF_EXPERTS)
def test_limits_apply_to_scaled_sums(emulator: Device, kernel: str) -> None:
    OF_EXPERTS[kernel](emulator, 1, CLAMPED, FP8_CHANNEL)


@pytest.mark.parametrize(
    ("width", "tile", "tokens"), [(8, None, 1), (8, None, 7), (0, FEW_ROWS, 21), (0, MANY_ROWS, 150)]
)
@pytest.mark.parametrize("kind", ["some_missing", "one_expert"])
def test_the_layer(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, width: int, tile: RowTile | None, tokens: int, kind: str
) -> None:
    h.force_step(monkeypatch, width=width, tile=tile)
    gen, experts = h.seeded(tokens, CPU), 5
    x, layer = h.random_tokens(gen, tokens, 384), h.random_layer(gen, experts, 384, 256, FP8_CHANNEL)
    routing = h.random_routing(gen, kind, tokens, 3, experts)

    def layer_op() -> torch.Tensor:
        return fused_moe(x, *layer, *routing, weights=FP8_CHANNEL, activation=CLAMPED)

    out = emulator.execute(1, layer_op)
    expected = h.layer_reference(x, layer, *routing, quantized=True, activation=CLAMPED)
    assert h.relative_l2(out, expected) <= MOST_ERROR
    assert h.relative_l2(out, layer_op()) <= MOST_ERROR  # of the reference


@seeds
@pytest.mark.parametrize(("m", "n", "k", "splits"), [(5, 200, 1920, 3), (32, 72, 384, 1), (9, 640, 384, 2)])
def test_a_dense_layer_of_few_rows(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, splits: int, seed: int
) -> None:
    h.force_dense(monkeypatch, lambda m, n, _: few_rows(m, n, splits))
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), m, n, k, FP8_CHANNEL)


@seeds
@pytest.mark.parametrize(
    ("m", "tile_n", "n", "k"), [(1, 16, 40, 640), (65, 112, 2112, 128), (33, 144, 584, 256), (129, 192, 200, 384)]
)
def test_a_dense_layer_of_some_rows(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, m: int, tile_n: int, n: int, k: int, seed: int
) -> None:
    h.force_dense_tile(monkeypatch, 128, tile_n)
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), m, n, k, FP8_CHANNEL)


@seeds
@pytest.mark.parametrize(("m", "tile_n", "n", "k"), [(300, 256, 776, 128), (520, 256, 200, 640), (200, 144, 584, 384)])
def test_a_dense_layer_of_many_rows(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, m: int, tile_n: int, n: int, k: int, seed: int
) -> None:
    h.force_dense_clusters(monkeypatch, tile_n)
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), m, n, k, FP8_CHANNEL)
