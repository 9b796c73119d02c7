"""The emulator, compiled once a session."""

import ctypes
import itertools

import pytest

from fp8moe_plugin.plan.sm90.catalog import tiles_of_ends_key, tiles_of_indices_key
from fp8moe_plugin.plan.spec import Arrival
from tests import helpers as h
from tests.emulator.build import Kernels, can_compile, runtime
from tests.emulator.device import Device

MULTIPROCESSORS = 4  # fewer than a GPU has: each works on several tiles


@pytest.fixture(scope="session")
def emulator_runtime() -> ctypes.CDLL:
    if not can_compile():
        pytest.skip("the emulator needs an x86-64 with a g++ that knows C++20")
    return runtime()


@pytest.fixture(scope="session")
def kernels(emulator_runtime: ctypes.CDLL) -> Kernels:
    """All that the tests run; those of the first tests first."""
    kernels = Kernels()
    layers = (h.moe_kernels(False, arrival) for arrival in Arrival)
    kernels.start(*itertools.chain(*layers), *h.linear_kernels(False), tiles_of_ends_key(), tiles_of_indices_key())
    return kernels


@pytest.fixture
def emulator(emulator_runtime: ctypes.CDLL, kernels: Kernels) -> Device:
    return Device(emulator_runtime, kernels, MULTIPROCESSORS)
