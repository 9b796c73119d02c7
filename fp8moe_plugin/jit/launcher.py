"""Launch kernels on torch's current stream through the CUDA driver, with arguments packed once a call."""

import ctypes
import functools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8moe_plugin.errors import LaunchError
from fp8moe_plugin.jit.lookup import WARMUP, Origin, find_or_compile
from fp8moe_plugin.plan import KernelKey

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64


class TensorMap:
    """A TMA descriptor of a row-major matrix, as a kernel argument (`CUtensorMap`)."""

    def __init__(self) -> None:
        self._room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
        self.address = -(-ctypes.addressof(self._room) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT

    def getPtr(self) -> int:
        return self.address


Argument = torch.Tensor | TensorMap | int | None


def launch(
    key: KernelKey,
    grid: int | tuple[int, int],
    args: tuple[Argument, ...],
    device: torch.device,
    early: bool = False,
) -> None:
    """Launch a kernel on the current stream of `device`; it is compiled and loaded the first time.

    Args:
        grid: blocks, along x or along (x, y).
        args: tensors and None as pointers, `TensorMap` by value, int as 32 bits.
        early: it may start when the kernel launched before it lets it, not only when that one has ended (programmatic
            dependent launch; csrc/common.cuh says what such a kernel owes the others).
    Raises:
        CompileError: the kernel does not compile.
        LaunchError: the driver refuses it, or it is not loaded yet while the stream is being captured.
    """
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(key, grid, args, device, early)
    from cuda.bindings import driver

    _bind_context(device.index)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY = grid if isinstance(grid, tuple) else (grid, 1)
    config.blockDimX = key.threads
    config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = key.smem_bytes
    config.hStream = torch._C._cuda_getCurrentRawStream(device.index)
    if early:
        config.attrs, config.numAttrs = [_early_launch()], 1
    function = load(key, device.index)
    packed = tuple(_pack(a) for a in args)
    params = (tuple(value for value, _ in packed), tuple(kind for _, kind in packed))
    (status,) = driver.cuLaunchKernelEx(config, function, params, 0)
    _check(status, f"launch of {key.source} with grid {grid}")


@functools.cache
def _early_launch() -> Any:
    from cuda.bindings import driver

    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute


def _pack(argument: Argument) -> tuple[Any, Any]:
    match argument:
        case torch.Tensor():
            return argument.data_ptr(), ctypes.c_void_p
        case None:
            return 0, ctypes.c_void_p
        case TensorMap():
            return argument, None
        case int():
            return argument, ctypes.c_int


@dataclass
class LoadCounts:
    """How many kernels this process loaded from where, and the seconds it took."""

    origins: Counter[Origin] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def loaded(self) -> int:
        return self.origins.total()


counts = LoadCounts()


def load(key: KernelKey, device_index: int, warmup: str = WARMUP) -> Any:
    """The kernel as the driver's function on one device, ready to launch.

    Args:
        warmup: the command that would have compiled it, for the error that asks for it.
    Raises:
        CompileError, KernelNotPrecompiled: there is no cubin of it.
        LaunchError: the driver refuses it, or the stream is being captured.
    """
    function = _functions.get((key, device_index))
    if function is None:
        with torch.cuda.device(device_index):
            function = _functions[key, device_index] = _load(key, device_index, warmup)
    return function


_functions: dict[tuple[KernelKey, int], Any] = {}


def _load(key: KernelKey, device_index: int, warmup: str) -> Any:
    from cuda.bindings import driver

    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"{key} is not loaded, and cannot be while a CUDA graph is captured. Call the op once before the capture."
        )
    start = time.perf_counter()
    cubin, origin = find_or_compile(key, warmup)
    _bind_context(device_index)
    library = _check(*driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0), f"load of {key.source}")
    kernel = _check(*driver.cuLibraryGetKernel(library, key.source.encode()), f"entry {key.source}")
    function = _check(*driver.cuKernelGetFunction(kernel), f"function {key.source}")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuFuncSetAttribute(function, attribute, key.smem_bytes)
    _check(status, f"{key.smem_bytes} bytes of shared memory for {key.source}")
    counts.origins[origin] += 1
    counts.seconds += time.perf_counter() - start
    return function


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int, element_size: int) -> TensorMap:
    """A map of a dense row-major matrix, 128-byte swizzled; `box_columns * element_size` is 128 bytes.

    Raises:
        LaunchError: the driver refuses it.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element_size == 1 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    result = TensorMap()
    status = _libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(result.address),
        int(kind),
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * element_size),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    _check(driver.CUresult(status), f"tensor map of a {rows} x {columns} matrix")
    return result


_thread = threading.local()


def _bind_context(device_index: int) -> None:
    """Give the calling thread the context of its current device; it has none before its first CUDA call."""
    if getattr(_thread, "has_context", False):
        return
    from cuda.bindings import driver

    what = f"context of device {device_index}"
    if not int(_check(*driver.cuCtxGetCurrent(), what)):
        device = _check(*driver.cuDeviceGet(device_index), what)
        context = _check(*driver.cuDevicePrimaryCtxRetain(device), what)
        (status,) = driver.cuCtxSetCurrent(context)
        _check(status, what)
    _thread.has_context = True


@functools.cache
def _libcuda() -> ctypes.CDLL:
    # cuda-bindings encodes into a Python object, whose address need not be aligned as the driver asks
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _check(status: Any, *rest: Any) -> Any:
    """The value the driver returned beside `status`, if any; `rest` ends with what was tried."""
    from cuda.bindings import driver

    *values, what = rest
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise LaunchError(
            f"The CUDA driver refused the {what}: {text.decode()} ({status}). Check with nvidia-smi that the driver "
            "works and supports CUDA 13, run again, and report this with the whole log if it comes back."
        )
    return values[0] if values else None
