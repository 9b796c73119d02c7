"""Biases in each kernel of the experts, on the emulator."""

from collections.abc import Callable

import pytest

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from tests.emulator import biases
from tests.emulator.activations import OF_EXPERTS
from tests.emulator.device import Device
from tests.emulator.layers import MOST_ERROR, run_packed_layer


@pytest.mark.parametrize("kernel", OF_EXPERTS)
def test_the_activation_is_that_of_biased_sums(emulator: Device, kernel: str) -> None:
    OF_EXPERTS[kernel](emulator, 1, biases.OAI, FP8_BLOCK, True)


@pytest.mark.parametrize("run", [biases.of_many_rows, biases.of_few_rows, biases.small_batch])
def test_the_second_gemm_adds_its_bias_once(emulator: Device, run: Callable[[Device, int], None]) -> None:
    run(emulator, 1)


@pytest.mark.parametrize("tokens", [5, 40, 70], ids=["fewer rows", "few rows", "many rows"])
def test_a_layer_in_packed_mxfp4(emulator: Device, tokens: int) -> None:
    assert run_packed_layer(emulator, 1, tokens, biased=True) <= MOST_ERROR
