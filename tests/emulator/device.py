"""A device for the ops' launches: kernels are queued as on a stream, and run together when the test says so."""

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fp8moe_plugin.formats.activation import ActivationNumbers
from fp8moe_plugin.jit.launch import Chunks, Launch, PerGroup, TensorMap
from fp8moe_plugin.jit.launcher import FORMATS, NUMBERS, layout, packed_chunks
from fp8moe_plugin.jit.sequence import TENSOR_MAP_BYTES, aligned_buffer
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.ops import signature
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.parameters import ARGUMENTS, PARAMETERS
from tests import helpers as h
from tests.emulator.build import Kernels

MOST_ARGUMENTS = 64
SHARED_BYTES = 228 * 1024  # of an SM of an H200
Result = TypeVar("Result")


class EmulatorError(Exception):
    """A kernel did what the emulator knows to be wrong, or never ended."""


class Device:
    """A device of the ops, `fp8moe_plugin.ops.devices.Device`, on tensors of the CPU."""

    backend = BACKENDS[SM90]

    def __init__(
        self,
        runtime: ctypes.CDLL,
        kernels: Kernels,
        multiprocessors: int,
        shared_bytes: int = SHARED_BYTES,
        number: int = 0,
    ) -> None:
        """Devices with other numbers run beside this one: `run` of one of them runs what is queued on all.

        Args:
            shared_bytes: shared memory of a multiprocessor, which decides whose blocks run on it together.
        """
        self._runtime, self._kernels, self._number = runtime, kernels, number
        self.multiprocessors, self._shared_bytes = multiprocessors, shared_bytes
        self._runtime.emu_run.restype = ctypes.c_char_p
        self._runtime.emu_reset()
        self._alive: list[object] = []  # what queued kernels refer to

    def beside(self, number: int) -> "Device":
        """Returns another device like this one, with its own number."""
        return Device(self._runtime, self._kernels, self.multiprocessors, self._shared_bytes, number)

    @contextmanager
    def serves_ops(self) -> Iterator[None]:
        """Ops on CPU tensors queue kernels here instead of calling their references."""
        with pytest.MonkeyPatch.context() as patch, _Addresses(self._lend):
            patch.setattr(signature, "_native", lambda: None)  # would ask for addresses behind `_Addresses`' back
            h.serve(patch, self)
            yield

    def execute(self, seed: int, ops: Callable[[], Result]) -> Result:
        """Returns what `ops` return, whose kernels have run."""
        with self.serves_ops():
            result = ops()
        self.run(seed)
        return result

    def prepare(self, launches: Iterable[Launch]) -> Callable[[tuple[int, ...]], None]:
        launches = tuple(launches)

        def queue(addresses: tuple[int, ...]) -> None:
            for launch in launches:
                self._queue(launch, addresses)

        return queue

    def _queue(self, launch: Launch, addresses: tuple[int, ...]) -> None:
        key, grid, args, pdl, cluster = launch
        library, expected = self._kernels.load(key), PARAMETERS[key.source]
        assert isinstance(args, ARGUMENTS[key.source])
        sizes = (ctypes.c_int * MOST_ARGUMENTS)()
        count = library.emu_sizes(sizes)
        assert sizes[:count] == [struct.calcsize(FORMATS[p.kind]) for p in expected], f"parameters of {key}"
        known = (h.resolved(argument, addresses) for argument in args)
        packer, offsets = layout(key.source)
        packed = packer.pack(*map(self._packed, known))
        buffer, begin = aligned_buffer(len(packed))
        ctypes.memmove(begin, packed, len(packed))
        pointers = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        self._alive += [buffer, pointers]
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        cluster = dict(key.defines).get("CLUSTER", cluster)
        self._runtime.emu_launch(
            self._number, library.emu_entry, x, y, key.threads, key.smem_bytes, pointers, int(pdl), cluster
        )

    def _packed(self, argument: TensorMap | Chunks | PerGroup | ActivationNumbers | int) -> bytes | int:
        """Returns an argument as `struct` takes it."""
        if isinstance(argument, TensorMap):
            return self._encode(argument)
        if isinstance(argument, Chunks):
            return packed_chunks(argument, argument.address)
        if isinstance(argument, PerGroup):
            elements = argument.elements
            return b"".join(struct.pack("i", e) if isinstance(e, int) else self._encode(e) for e in elements)
        if isinstance(argument, ActivationNumbers):
            return struct.pack(NUMBERS, *argument)
        return argument

    def _encode(self, tensor_map: TensorMap) -> bytes:
        address, sizes, strides, box, element_size, l2_fetch = tensor_map
        assert l2_fetch in (128, 256)
        assert box[0] * element_size == 128, "the emulator has 128-byte swizzle only"
        assert all(0 < elements <= 256 for elements in box), "as large as a box may be"
        assert not any(n % 16 for n in (address, sizes[0] * element_size, *strides)), "TMA needs multiples of 16 bytes"
        dims, result = len(sizes), ctypes.create_string_buffer(TENSOR_MAP_BYTES)
        shape = (
            (ctypes.c_longlong * dims)(*sizes),
            (ctypes.c_longlong * dims)(element_size, *strides),
            (ctypes.c_uint * dims)(*box),
        )
        self._runtime.emu_tensor_map(result, ctypes.c_void_p(address), element_size, dims, *shape)
        return result.raw

    def run(self, seed: int) -> None:
        """Run what is queued, in an order that the seed decides.

        Raises:
            EmulatorError: what went wrong, and what each warp was waiting for.
        """
        error = self._runtime.emu_run(ctypes.c_ulonglong(seed), self.multiprocessors, self._shared_bytes).decode()
        self._alive.clear()
        if error:
            raise EmulatorError(f"seed {seed}: {error}")

    def _lend(self, tensor: torch.Tensor) -> None:
        """Copies of the next run may touch the tensor's memory, which stays until then."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._runtime.emu_memory(ctypes.c_void_p(storage.data_ptr()), ctypes.c_ulonglong(storage.nbytes()))


class _Addresses(TorchFunctionMode):
    """Tells of each tensor whose address is asked for: on a GPU its memory would be kept by the stream."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            self._tell(args[0])
        return func(*args, **(kwargs or {}))
