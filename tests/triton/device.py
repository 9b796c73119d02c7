"""A device for the ops' launches that runs Triton kernels in Triton's interpreter, on tensors of the CPU."""

import ctypes
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.experimental.gluon  # which the interpreter imports later, when it must not be patched
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction

from fp8moe_plugin import triton_kernels
from fp8moe_plugin.jit.launch import Launch
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.parameters import ARGUMENTS
from fp8moe_plugin.plan.triton.signatures import TRITON_SCRATCH, TRITON_SIGNATURES
from tests import helpers as h

DTYPES = {"*bf16": torch.bfloat16, "*fp8e4nv": torch.float8_e4m3fn, "*fp32": torch.float32, "*i32": torch.int32}
LIBRARY = tl, tl.standard, tl.core, tl.math
PATCHED_TYPES = tl.core.tensor, tl.core.dtype, tl.core.condition, tl.core.tensor_descriptor_base
FLOATS = {
    "bf16": (torch.bfloat16, torch.int16),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}


class Device:
    """A device of the ops, `fp8moe_plugin.ops.devices.Device`. A launch has run when its call returns."""

    multiprocessors = 132

    def __init__(self, target: str = "sm_89") -> None:
        self.backend = BACKENDS[target]
        self.launched: list[Launch] = []

    def prepare(self, launches: Iterable[Launch]) -> Callable[[tuple[int, ...]], None]:
        launches = tuple(launches)

        def run(addresses: tuple[int, ...]) -> None:
            for launch in launches:
                self.launched.append(launch)
                _run(launch, addresses)

        return run


def _run(launch: Launch, addresses: tuple[int, ...]) -> None:
    key, grid, args = launch.key, launch.grid, launch.args
    assert isinstance(args, ARGUMENTS[key.source])
    assert key.source in TRITON_SIGNATURES
    assert not launch.pdl
    values = {}
    for parameter, argument in zip(TRITON_SIGNATURES[key.source], args[: -len(TRITON_SCRATCH)], strict=True):
        value = h.resolved(argument, addresses)
        assert parameter.divisor == 1 or value % parameter.divisor == 0, f"{parameter.name} of {key}: {value}"
        pointer = parameter.type.startswith("*")
        values[parameter.name] = _at(value, DTYPES[parameter.type]) if pointer else value
    with np.errstate(all="ignore"), interpreting():
        _kernels()[key.source][(grid,)](**values, **dict(key.defines))


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the element at an address; of others the interpreter computes the addresses."""
    if not address:
        return torch.zeros(1, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(address), dtype=dtype)


@functools.cache
def _kernels() -> dict[str, InterpretedFunction]:
    """Returns the kernels as functions of the interpreter, from modules of their own."""
    name = triton_kernels.__name__
    with pytest.MonkeyPatch.context() as patch, triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        for module in [m for m in sys.modules if m.startswith(f"{name}.")]:
            patch.delitem(sys.modules, module)
        modules = [importlib.import_module(f"{name}.{m.name}") for m in pkgutil.iter_modules(triton_kernels.__path__)]
        for module in modules:
            del sys.modules[module.__name__]
    return {key: value for module in modules for key, value in vars(module).items() if key in TRITON_SIGNATURES}


@contextmanager
def interpreting() -> Iterator[None]:
    """Triton's own library, which is written in Triton, belongs to the interpreter, too: as with TRITON_INTERPRET=1."""
    with pytest.MonkeyPatch.context() as patch, _as_before(*LIBRARY, *PATCHED_TYPES):
        for module in LIBRARY:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, _interpreted(value))
        patch.setattr(interpreter, "_convert_float", _convert_float)
        patch.setattr(interpreter.InterpreterBuilder, "create_fma", _create_fma)
        yield


@contextmanager
def _as_before(*owners: Any) -> Iterator[None]:
    """Restore their attributes: the interpreter leaves what it patches for a function that another one calls."""
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            for name, value in attributes.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def _convert_float(values: np.ndarray, from_type: tl.dtype, to_type: tl.dtype, mode: object) -> np.ndarray:
    """Round to nearest, as GPUs do: the interpreter truncates, and loses the carry where an exponent changes."""
    source, (result, as_integers) = FLOATS[str(from_type)][0], FLOATS[str(to_type)]
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{source.itemsize}"))
    numbers = bits.view(source).float()
    numbers = numbers.clamp(-448, 448) if result == torch.float8_e4m3fn else numbers
    return numbers.to(result).view(as_integers).numpy()


def _create_fma(builder: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """Rounded once; the interpreter of Triton 3.7 rounds the product, too."""
    product = np.multiply(x.data, y.data, dtype=np.float64)  # exact for float32
    total = product + z.data
    of_product = total - z.data
    error = (product - of_product) + (z.data - (total - of_product))  # of the sum, exact (Knuth's TwoSum)
    # Rounded to odd, so that rounding again to float32 is the only rounding that counts (Boldo and Melquiond 2008).
    odd = total.view(np.int64) % 2 != 0
    inexact = np.isfinite(total) & (error != 0) & ~odd
    total = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


@functools.cache
def _interpreted(function: JITFunction) -> Any:
    return InterpretedFunction(function.fn)
