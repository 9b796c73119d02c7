"""The emulator, compiled once a session."""

import ctypes

import pytest

from fp8moe_plugin.plan import (
    Layout,
    Output,
    combine_key,
    count_experts_key,
    gate_up_key,
    grouped_gemm_key,
    quantize_key,
    route_key,
    silu_mul_quant_key,
    swap_ab_key,
    tiles_of_counts_key,
    tiles_of_indices_key,
)
from tests.emulator.build import Kernels, can_compile, runtime
from tests.emulator.device import Device

MULTIPROCESSORS = 4  # fewer than a GPU has: each works on several tiles


@pytest.fixture(scope="session")
def emulator_runtime(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not can_compile():
        pytest.skip("the emulator needs an x86-64 with a g++ that knows C++20")
    return runtime(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def kernels(emulator_runtime: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """All that the tests run; those of the first tests first."""
    kernels = Kernels(tmp_path_factory.mktemp("kernels"))
    gemms = (swap_ab_key(), grouped_gemm_key(Output.BF16), gate_up_key(False, gather=False), gate_up_key(False, True))
    routing = (count_experts_key(), route_key(), tiles_of_counts_key(), tiles_of_indices_key())
    quantization = (*(quantize_key(False, layout) for layout in Layout), silu_mul_quant_key(False))
    kernels.start(*gemms, *routing, *quantization, combine_key())
    return kernels


@pytest.fixture
def emulator(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> Device:
    return Device(emulator_runtime, kernels, MULTIPROCESSORS)
