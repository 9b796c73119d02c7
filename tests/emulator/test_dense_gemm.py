"""Dense layers of few rows on the emulator: blocks take equal shares of the weights, and share tiles."""

import ctypes

import pytest
import torch

from fp8moe_plugin.ops import fp8_gemm_nt, gemm_launch
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.ops.quantize import per_token_group_quant_fp8
from fp8moe_plugin.plan import DENSE_SPLITS, dense_share, dense_swap_ab_key
from fp8moe_plugin.shapes import GROUP, ceil_div
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import Device
from tests.emulator.inputs import assert_close

CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])
# Weights [N, K], multiprocessors; and which blocks share each tile.
SHARES = {
    "one block": (200, 384, 1, ["0", "0"]),
    "whole tiles": (512, 256, 2, ["0", "0", "1", "1"]),
    "less than a tile": (128, 1024, 4, ["0123"]),
    "as many blocks as may share a tile": (72, 1920, 16, ["01234567"]),
    "shares that end within tiles": (640, 384, 4, ["0", "01", "12", "2", "3"]),
    "more than a tile, and the end of one": (520, 640, 3, ["0", "01", "1", "12", "2"]),
    "three or four blocks a tile": (384, 1024, 8, ["012", "2345", "567"]),
}


@pytest.fixture(autouse=True)
def at_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where K is short, layers take this kernel for a few rows only."""
    monkeypatch.setattr(gemm_launch, "dense_key", lambda *_: dense_swap_ab_key())


@pytest.mark.parametrize("name", SHARES)
def test_blocks_share_tiles_as_these_tests_need_it(name: str) -> None:
    n, k, multiprocessors, expected = SHARES[name]
    steps, share = k // GROUP, dense_share(n, k, multiprocessors)
    blocks = [
        "".join(map(str, sorted({unit // share for unit in range(column * steps, (column + 1) * steps)})))
        for column in range(ceil_div(n, GROUP))
    ]
    assert blocks == expected
    assert max(map(len, blocks)) <= DENSE_SPLITS


@pytest.fixture(params=SHARES)
def shape(request: pytest.FixtureRequest, emulator_runtime: ctypes.CDLL, kernels: Kernels) -> tuple[int, int, Device]:
    """N, K, and a device on which blocks share tiles as `SHARES` says."""
    n, k, multiprocessors, _ = SHARES[request.param]
    return n, k, Device(emulator_runtime, kernels, multiprocessors)


@seeds
@pytest.mark.parametrize("m", [1, 5, 16, 33, 64, 65, 128, 200])
def test_a_dense_layer_of_few_rows(shape: tuple[int, int, Device], m: int, seed: int) -> None:
    (n, k, device), gen = shape, h.seeded(seed, CPU)
    x, weight = h.random_tokens(gen, m, k), h.random_weights(gen, n, k)
    out = device.execute(seed, lambda: fp8_linear(x, *weight))
    assert_close(out, h.product(per_token_group_quant_fp8(x), weight), "the layer")


@seeds
def test_rows_that_are_quantized_already(shape: tuple[int, int, Device], seed: int) -> None:
    (n, k, device), gen = shape, h.seeded(seed, CPU)
    a, b = h.random_quantized(gen, 9, k), h.random_weights(gen, n, k)
    out = h.poisoned(9, n, dtype=torch.bfloat16, device=CPU)
    device.execute(seed, lambda: fp8_gemm_nt(a, b, out))
    assert_close(out, h.product(a, b), "the product")


def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int, Device]) -> None:
    (n, k, device), gen = shape, h.seeded(0, CPU)
    x, weight = h.random_tokens(gen, 128, k), h.random_weights(gen, n, k)
    all_rows = device.execute(0, lambda: fp8_linear(x, *weight))
    for seed, rows in enumerate((slice(0, 1), slice(60, 77), slice(3, 64), slice(0, 127))):
        some = device.execute(seed, lambda rows=rows: fp8_linear(x[rows].contiguous(), *weight))
        assert h.same_bits(some, all_rows[rows])
