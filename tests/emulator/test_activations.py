"""Limits, alpha and beta in each kernel that has an activation, on the emulator."""

import pytest
import torch

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.ops import silu_mul_quant_fp8
from tests import helpers as h
from tests.emulator.activations import CPU, KERNELS
from tests.emulator.device import Device


@pytest.mark.parametrize("activation", h.MODIFIED, ids=lambda activation: activation.kind)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_modified_swiglu_is_that_of_float64(emulator: Device, kernel: str, activation: Activation) -> None:
    KERNELS[kernel](emulator, 1, activation)


@pytest.mark.parametrize("activation", h.MODIFIED, ids=lambda activation: activation.kind)
def test_no_limit_hides_nan(emulator: Device, activation: Activation) -> None:
    sums = h.random_tokens(h.seeded(0, CPU), 1, 3, 512)
    sums[0, 0, 5], sums[0, 1, 256 + 130] = float("nan"), float("nan")
    counts = torch.tensor([3], dtype=torch.int32)
    q, scales = emulator.execute(1, lambda: silu_mul_quant_fp8(sums, counts, activation=activation))
    is_nan = h.dequantize_tokens(q, scales)[0].isnan().unflatten(-1, (-1, 128)).all(-1)
    assert is_nan.tolist() == [[True, False], [False, True], [False, False]]
