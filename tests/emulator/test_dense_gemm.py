"""Dense layers on the emulator."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops import fp8_gemm_nt, fp8_linear, per_token_group_quant_fp8
from fp8moe_plugin.plan.sm90 import dense
from fp8moe_plugin.plan.sm90.catalog import DENSE_FEW_TILE_ROWS
from fp8moe_plugin.plan.sm90.dense import DensePlan
from fp8moe_plugin.plan.spec import Output
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import SHARED_BYTES, Device
from tests.emulator.inputs import assert_close
from tests.emulator.layers import run_dense_layer

CPU = torch.device("cpu")
MULTIPROCESSORS = 6
seeds = pytest.mark.parametrize("seed", [1, 2])


@pytest.fixture
def emulator(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> Device:
    return Device(emulator_runtime, kernels, MULTIPROCESSORS, SHARED_BYTES)


# Weights [N, K], blocks of a cluster that share columns, each a part of K: parts of one length and of several, fewer
# steps than stages and more, columns past the last, more clusters than run at once.
@pytest.fixture(
    params=[
        *[(8, 384, 2), (200, 1920, 3), (1024, 256, 2), (640, 384, 3), (2120, 384, 3)],
        *[(72, 1152, 5), (128, 1920, 6), (64, 7168, 2)],
    ]
)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    n, k, splits = request.param
    h.force_dense(monkeypatch, lambda m, n, _: dense.few_rows(m, n, splits))
    return n, k


@seeds
@pytest.mark.parametrize("m", [1, 5, 8, 16, 17, 32])
def test_a_dense_layer_of_few_rows(emulator: Device, shape: tuple[int, int], m: int, seed: int) -> None:
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), m, *shape)


@seeds
def test_rows_that_are_quantized_already(emulator: Device, shape: tuple[int, int], seed: int) -> None:
    (n, k), gen = shape, h.seeded(seed, CPU)
    a, b = h.random_quantized(gen, 9, k), h.random_weights(gen, n, k)
    out = h.poisoned(9, n, dtype=torch.bfloat16, device=CPU)
    emulator.execute(seed, lambda: fp8_gemm_nt(a, b, out))
    assert_close(out, h.product(a, b), "the product")


def test_a_row_has_the_same_bits_among_any_others(emulator: Device, shape: tuple[int, int]) -> None:
    (n, k), gen = shape, h.seeded(0, CPU)
    x, weight = h.random_tokens(gen, DENSE_FEW_TILE_ROWS[-1], k), h.random_weights(gen, n, k)
    all_rows = emulator.execute(0, lambda: fp8_linear(x, *weight))
    for seed, rows in enumerate((slice(0, 1), slice(9, 26), slice(24, 32))):
        some = emulator.execute(seed, lambda rows=rows: fp8_linear(x[rows].contiguous(), *weight))
        assert h.same_bits(some, all_rows[rows])


@seeds
def test_layers_in_a_row(emulator: Device, seed: int) -> None:
    """Each reads what the one before has written."""
    gen, m = h.seeded(0, CPU), 9
    x, weights = h.random_tokens(gen, m, 256), [h.random_weights(gen, n, k) for n, k in ((640, 256), (256, 640)) * 2]
    outs: list[torch.Tensor] = []

    def ops() -> None:
        for weight in weights:
            outs.append(fp8_linear(outs[-1] if outs else x, *weight))

    emulator.execute(seed, ops)
    for given, weight, out in zip([x, *outs[:-1]], weights, outs, strict=True):
        assert_close(out, h.product(per_token_group_quant_fp8(given), weight), "a layer")


# Rows and columns of a tile, weights [N, K]: more tiles than multiprocessors and fewer, tiles in which one or two
# blocks of scales end, blocks that hold several tiles, columns past the last.
@pytest.fixture(
    params=[
        *[(64, 16, 40, 1920), (64, 32, 264, 256), (64, 64, 72, 128), (64, 96, 1000, 384), (64, 112, 2112, 128)],
        *[(64, 128, 520, 256), (64, 144, 584, 1152), (64, 192, 2120, 256), (128, 16, 200, 128), (128, 32, 8, 256)],
        *[(128, 64, 640, 384), (128, 96, 296, 1152), (128, 112, 560, 256), (128, 128, 136, 640), (128, 144, 1160, 256)],
        *[(64, 160, 504, 384), (64, 176, 1000, 256), (128, 160, 648, 1152), (128, 176, 704, 640)],
        *[(128, 176, 936, 1152), (128, 192, 1544, 128), (128, 192, 200, 1920)],
    ]
)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    block_m, block_n, n, k = request.param
    h.force_dense_tile(monkeypatch, block_m, block_n)
    return n, k


@seeds
@pytest.mark.parametrize("m", [1, 5, 33, 64, 65, 129, 250])
def test_a_dense_layer_of_some_rows(emulator: Device, tile: tuple[int, int], m: int, seed: int) -> None:
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), m, *tile)


@seeds
def test_a_dense_layer_of_many_rows(emulator: Device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    h.force_dense(monkeypatch, lambda m, n, multiprocessors: dense.grouped(m, n, Output.BF16, multiprocessors))
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), 300, 200, 384)


# Columns of a tile, weights [N, K]: more pairs of tiles than clusters and fewer, columns past the last, K of fewer
# blocks than stages and more.
@seeds
@pytest.mark.parametrize("m", [1, 100, 200, 256, 300, 520])
@pytest.mark.parametrize(
    ("tile_n", "n", "k"),
    [
        *[(256, 512, 384), (256, 200, 1152), (256, 776, 128), (192, 576, 640), (192, 264, 384), (176, 1000, 256)],
        *[(176, 360, 1152), (144, 584, 384)],
    ],
)
def test_a_dense_layer_of_blocks_that_share_weights(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, m: int, tile_n: int, n: int, k: int, seed: int
) -> None:
    h.force_dense_clusters(monkeypatch, tile_n)
    run_dense_layer(emulator, seed, h.seeded(seed, CPU), m, n, k)


PLANS = {
    "few rows": lambda m, n, _: dense.few_rows(m, n, 3),
    "low tiles": lambda m, n, multiprocessors: dense.tiled(m, n, 64, 112, multiprocessors),
    "high tiles": lambda m, n, multiprocessors: dense.tiled(m, n, 128, 176, multiprocessors),
    "clusters": lambda m, n, multiprocessors: dense.many_rows(m, n, 144, multiprocessors),
    "wide clusters": lambda m, n, multiprocessors: dense.many_rows(m, n, 256, multiprocessors),
}


@pytest.mark.parametrize("weights", [FP8_BLOCK, FP8_CHANNEL], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_dense_layer_with_a_bias(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, plan: Callable[..., DensePlan], weights: WeightFormat
) -> None:
    h.force_dense(monkeypatch, plan)
    run_dense_layer(emulator, 1, h.seeded(1, CPU), 27, 1544, 384, weights, biased=True)


@pytest.mark.parametrize(("m", "k"), [(2400, 2176), (4300, 128)])  # where K is long and short
def test_pairs_of_tiles_in_two_bands(emulator: Device, monkeypatch: pytest.MonkeyPatch, m: int, k: int) -> None:
    h.force_dense_clusters(monkeypatch, 144)
    run_dense_layer(emulator, 0, h.seeded(0, CPU), m, 152, k)
