"""A device for the ops' launches: kernels are queued as on a stream, and run together when the test says so."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from fp8moe_plugin.jit.launcher import TENSOR_MAP_BYTES, Argument, TensorMap
from fp8moe_plugin.plan import KernelKey
from tests.emulator.build import Kernels

MOST_ARGUMENTS = 64
Result = TypeVar("Result")


class EmulatorError(Exception):
    """A kernel did what the emulator knows to be wrong, or never ended."""


class Device:
    """What `fp8moe_plugin.jit.launcher` is to a GPU, on tensors of the CPU."""

    def __init__(self, runtime: ctypes.CDLL, kernels: Kernels, multiprocessors: int) -> None:
        self._runtime, self._kernels, self._multiprocessors = runtime, kernels, multiprocessors
        self._runtime.emu_run.restype = ctypes.c_char_p
        self._runtime.emu_reset()
        self._alive: list[object] = []  # what queued kernels refer to

    @contextmanager
    def serves_ops(self) -> Iterator[None]:
        """Ops on CPU tensors queue kernels here instead of calling their references."""
        replaced = {
            "launch": self.launch,
            "tensor_map": self.tensor_map,
            "multiprocessors": lambda index: self._multiprocessors,
            "uses_sm90": lambda tensor: True,
        }
        with pytest.MonkeyPatch.context() as patch:
            for module in [module for name, module in sys.modules.items() if name.startswith("fp8moe_plugin.ops.")]:
                for name in replaced.keys() & vars(module).keys():
                    patch.setattr(module, name, replaced[name])
            yield

    def execute(self, seed: int, ops: Callable[[], Result]) -> Result:
        """What `ops` return, whose kernels have run."""
        with self.serves_ops():
            result = ops()
        self.run(seed)
        return result

    def launch(
        self,
        key: KernelKey,
        grid: int | tuple[int, int],
        args: tuple[Argument, ...],
        device: torch.device,
        early: bool = False,
    ) -> None:
        library = self._kernels.load(key)
        sizes = (ctypes.c_int * MOST_ARGUMENTS)()
        count = library.emu_sizes(sizes)
        values = [self._pack(argument) for argument in args]
        assert [ctypes.sizeof(value) for value in values] == sizes[:count], f"arguments of {key}"
        pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(value) for value in values))
        self._alive += [args, values, pointers]
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        self._runtime.emu_launch(library.emu_entry, x, y, key.threads, key.smem_bytes, pointers, int(early))

    def tensor_map(
        self, address: int, rows: int, columns: int, box_rows: int, box_columns: int, element_size: int
    ) -> TensorMap:
        assert address % 16 == columns * element_size % 16 == 0, "TMA needs multiples of 16 bytes"
        assert box_columns * element_size == 128, "the emulator has 128-byte swizzle only"
        assert 0 < box_rows <= 256, "as large as a box may be"
        result = TensorMap()
        sizes = (ctypes.c_longlong(rows), ctypes.c_longlong(columns), element_size, box_rows)
        self._runtime.emu_tensor_map(ctypes.c_void_p(result.address), ctypes.c_void_p(address), *sizes)
        self._allow_copies(address, rows * columns * element_size)
        return result

    def run(self, seed: int) -> None:
        """Run what is queued, in an order that the seed decides.

        Raises:
            EmulatorError: what went wrong, and what each warp was waiting for.
        """
        error = self._runtime.emu_run(ctypes.c_ulonglong(seed), self._multiprocessors).decode()
        self._alive.clear()
        if error:
            raise EmulatorError(f"seed {seed}: {error}")

    def _pack(self, argument: Argument) -> ctypes._SimpleCData | ctypes.Array:
        match argument:
            case torch.Tensor():
                storage = argument.untyped_storage()
                self._allow_copies(storage.data_ptr(), storage.nbytes())
                return ctypes.c_void_p(argument.data_ptr())
            case None:
                return ctypes.c_void_p(None)
            case TensorMap():
                return (ctypes.c_char * TENSOR_MAP_BYTES).from_address(argument.address)
            case int():
                return ctypes.c_int(argument)

    def _allow_copies(self, address: int, size: int) -> None:
        self._runtime.emu_memory(ctypes.c_void_p(address), ctypes.c_ulonglong(size))
