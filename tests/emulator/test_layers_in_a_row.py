"""Layers that are queued together with one scratch: kernels of one must be done with it before the next one's begin."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from fp8moe_plugin.ops import devices, fused_moe, workspace
from fp8moe_plugin.ops.moe import prepared_layer
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.conftest import MULTIPROCESSORS
from tests.emulator.device import SHARED_BYTES, Device
from tests.emulator.first_kernels import (
    choice_behind_dense_layer,
    contiguous_gemm_behind_choice,
    gate_behind_dense_layer,
    layer_behind_choice,
    layer_behind_dense_layer,
    layer_that_chooses,
    masked_gemm_behind_choice,
    psum_gemm_behind_choice,
)
from tests.emulator.layers import MOST_ERROR, run_layers, run_quantized_tokens

seeds = pytest.mark.parametrize("seed", [1, 2, 3])


@seeds
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [
        (1, 1024, 128),  # decode: splits of K
        (9, 256, 256),
        (40, 1024, 256),  # tiles from the counter
        (150, 256, 256),  # prefill
        (300, 256, 256),  # that keeps weights
    ],
)
def test_layers_that_share_their_scratch(
    emulator: Device, tokens: int, hidden: int, intermediate: int, seed: int
) -> None:
    errors = run_layers(emulator, seed, tokens, hidden, intermediate)
    assert max(errors) <= MOST_ERROR, f"relative L2 of each layer: {errors}"


@seeds
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(1, 1024, 128), (9, 256, 256), (150, 256, 256)])
def test_layers_where_both_gemms_have_room_on_a_multiprocessor(
    emulator_runtime: ctypes.CDLL, kernels: Kernels, tokens: int, hidden: int, intermediate: int, seed: int
) -> None:
    emulator = Device(emulator_runtime, kernels, MULTIPROCESSORS, 2 * SHARED_BYTES)
    errors = run_layers(emulator, seed, tokens, hidden, intermediate)
    assert max(errors) <= MOST_ERROR, f"relative L2 of each layer: {errors}"


@seeds
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"), [(1, 1024, 128), (9, 256, 256), (40, 1024, 256), (300, 256, 256)]
)
def test_layers_under_a_limit_of_multiprocessors(
    emulator: Device, monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, intermediate: int, seed: int
) -> None:
    """No kernel starts early: what waits for parts of the one before finds them all."""
    serve, limited = h.serve, devices._Limited(emulator, MULTIPROCESSORS - 1)
    monkeypatch.setattr(h, "serve", lambda patch, _: serve(patch, limited))
    errors = run_layers(emulator, seed, tokens, hidden, intermediate)
    assert max(errors) <= MOST_ERROR, f"relative L2 of each layer: {errors}"


@seeds
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "copies"),
    [
        (1, 1024, 128, False),  # splits of K
        (9, 256, 256, False),
        (150, 256, 256, False),
        (600, 128, 128, False),  # more than a chunk of pairs
        (150, 256, 256, True),
        (600, 128, 128, True),
    ],
)
def test_tokens_that_arrive_quantized_give_the_same_bits(
    emulator: Device, tokens: int, hidden: int, intermediate: int, copies: bool, seed: int
) -> None:
    quantized, bfloat16 = run_quantized_tokens(emulator, seed, tokens, hidden, intermediate, copies)
    assert h.same_bits(quantized, bfloat16)


def test_ops_do_not_launch_what_they_have_kept_of_another_device(
    emulator_runtime: ctypes.CDLL, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = h.random_layer(h.seeded(0, torch.device("cpu")), 3, 128, 128), torch.zeros(1, 128).bfloat16()
    call, scratch = (x, *layer, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32)), torch.zeros(2**20).byte()
    monkeypatch.setattr(workspace, "scratch", lambda nbytes, like: scratch[:nbytes])
    prepared_layer.cache_clear()
    for number in (1, 2):
        Device(emulator_runtime, kernels, MULTIPROCESSORS).execute(1, lambda: fused_moe(*call, out=x))
        assert prepared_layer.cache_info().currsize == number


@seeds
@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize(
    "run",
    [
        choice_behind_dense_layer,
        contiguous_gemm_behind_choice,
        gate_behind_dense_layer,
        layer_behind_choice,
        layer_behind_dense_layer,
        layer_that_chooses,
        masked_gemm_behind_choice,
        psum_gemm_behind_choice,
    ],
)
def test_first_kernels_that_start_early_wait(
    emulator: Device, run: Callable[[Device, int, int], float], tokens: int, seed: int
) -> None:
    assert run(emulator, seed, tokens) <= MOST_ERROR
