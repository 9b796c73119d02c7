"""Dense layers of few rows on the emulator: a cluster of blocks shares columns, each a part of K."""

import ctypes

import pytest
import torch

from fp8moe_plugin.ops import fp8_gemm_nt, gemm_launch
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.ops.quantize import per_token_group_quant_fp8
from fp8moe_plugin.plan import DENSE_WIDTHS, dense_swap_ab_key
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import SHARED_BYTES, Device
from tests.emulator.inputs import assert_close

CPU = torch.device("cpu")
MULTIPROCESSORS = 6
seeds = pytest.mark.parametrize("seed", [1, 2])


@pytest.fixture
def emulator(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> Device:
    return Device(emulator_runtime, kernels, MULTIPROCESSORS, SHARED_BYTES)


# Weights [N, K], blocks of a cluster, blocks of a multiprocessor: parts of K of one length and of several, fewer steps
# than stages and more, columns past the last, more tiles or clusters than run at once.
@pytest.fixture(
    params=[
        *[(8, 128, 1, 2), (200, 1920, 1, 2), (1024, 256, 2, 2), (640, 384, 3, 2), (2120, 256, 1, 2)],
        *[(72, 1152, 5, 1), (128, 1920, 7, 2), (320, 1024, 8, 2), (64, 3584, 1, 1), (776, 1920, 1, 1)],
    ]
)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    n, k, splits, blocks = request.param
    monkeypatch.setattr(gemm_launch, "dense_key", lambda *_: dense_swap_ab_key(blocks))  # at any number of rows
    monkeypatch.setattr(gemm_launch, "dense_splits", lambda *_: splits)
    return n, k


@seeds
@pytest.mark.parametrize("m", [1, 5, 16, 17, 33, 64, 65, 128, 129, 250])
def test_a_dense_layer_of_few_rows(emulator: Device, shape: tuple[int, int], m: int, seed: int) -> None:
    (n, k), gen = shape, h.seeded(seed, CPU)
    x, weight = h.random_tokens(gen, m, k), h.random_weights(gen, n, k)
    out = emulator.execute(seed, lambda: fp8_linear(x, *weight))
    assert_close(out, h.product(per_token_group_quant_fp8(x), weight), "the layer")


@seeds
def test_rows_that_are_quantized_already(emulator: Device, shape: tuple[int, int], seed: int) -> None:
    (n, k), gen = shape, h.seeded(seed, CPU)
    a, b = h.random_quantized(gen, 9, k), h.random_weights(gen, n, k)
    out = h.poisoned(9, n, dtype=torch.bfloat16, device=CPU)
    emulator.execute(seed, lambda: fp8_gemm_nt(a, b, out))
    assert_close(out, h.product(a, b), "the product")


def test_a_row_has_the_same_bits_among_any_others(emulator: Device, shape: tuple[int, int]) -> None:
    (n, k), gen = shape, h.seeded(0, CPU)
    x, weight = h.random_tokens(gen, 2 * DENSE_WIDTHS[-1], k), h.random_weights(gen, n, k)
    all_rows = emulator.execute(0, lambda: fp8_linear(x, *weight))
    for seed, rows in enumerate((slice(0, 1), slice(60, 77), slice(3, 64), slice(100, 256))):
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
