"""Calls of the CUDA driver: loading of kernels, encoding of tensor maps, and errors."""

import ctypes
import functools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8moe_plugin.errors import LaunchError
from fp8moe_plugin.jit.cubin import split_shared_memory
from fp8moe_plugin.jit.launch import TensorMap
from fp8moe_plugin.jit.lookup import WARMUP, Origin, compiler_of, find_or_compile
from fp8moe_plugin.jit.sequence import TENSOR_MAP_BYTES, aligned_buffer, libcuda
from fp8moe_plugin.jit.toolchain import cuda_of_cubin
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.triton.catalog import TritonKey
from fp8moe_plugin.quoting import shown

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@dataclass
class LoadCounts:
    """The number of kernels that this process loaded, by origin, and the seconds it took."""

    origins: Counter[Origin] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def loaded(self) -> int:
        return self.origins.total()


counts = LoadCounts()


def load(key: KernelKey, device_index: int, warmup: str = WARMUP) -> Any:
    """Returns the driver's function of a kernel on one device, ready to launch.

    Args:
        warmup: the command that compiles it in advance, for the error message.
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
_shared_memory: dict[tuple[KernelKey, int], int] = {}


def shared_memory(key: KernelKey, device_index: int) -> int:
    """Returns the bytes of dynamic shared memory for launches of a loaded kernel."""
    return _shared_memory[key, device_index] if isinstance(key, TritonKey) else key.smem_bytes


def _load(key: KernelKey, device_index: int, warmup: str) -> Any:
    from cuda.bindings import driver

    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"{key} is not loaded, and cannot be while a CUDA graph is captured. Call the op once before the capture."
        )
    start = time.perf_counter()
    cubin, origin = find_or_compile(key, warmup)
    smem_bytes = key.smem_bytes
    if isinstance(key, TritonKey):
        cubin, smem_bytes = split_shared_memory(cubin)
        _shared_memory[key, device_index] = smem_bytes
    bind_context(device_index)
    _check_driver(compiler_of(origin, key.target), cuda_of_cubin(cubin))
    library = check(*driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0), f"load of {key.source}")
    kernel = check(*driver.cuLibraryGetKernel(library, key.source.encode()), f"entry {key.source}")
    function = check(*driver.cuKernelGetFunction(kernel), f"function {key.source}")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuFuncSetAttribute(function, attribute, smem_bytes)
    check(status, f"{smem_bytes} bytes of shared memory for {key.source}")
    counts.origins[origin] += 1
    counts.seconds += time.perf_counter() - start
    return function


@functools.cache
def _check_driver(compiler: str, cuda: int | None) -> None:
    """
    Args:
        compiler: the compiler of a kernel.
        cuda: the major CUDA version of its machine code, if it is known.
    Raises:
        LaunchError: the driver's major CUDA version is older. An older minor version is fine.
    """
    from cuda.bindings import driver

    version = check(*driver.cuDriverGetVersion(), "question for its version")
    major = version // 1000
    if cuda and cuda > major:
        way = f"serve from an environment with fp8moe-plugin[cu{major}] and a PyTorch for CUDA {major}"
        if compiler.startswith("triton"):
            way = f"compile them with an older Triton, whose assembler is that of CUDA {major}"
        raise LaunchError(
            f"The NVIDIA driver supports CUDA {major}.{version % 1000 // 10}, but the kernels were compiled by "
            f"{shown(compiler)} and need a driver for CUDA {cuda}. Either update the driver, or {way}."
        )


@functools.lru_cache(maxsize=4096)
def encode(tensor_map: TensorMap) -> bytes:
    """Returns the TMA descriptor (`CUtensorMap`) of a map whose address is known.

    Raises:
        LaunchError: the driver refuses it.
    """
    from cuda.bindings import driver

    address, sizes, strides, box, element_size, l2_fetch = tensor_map
    assert isinstance(address, int), "known"
    dims, kinds, promotions = len(sizes), driver.CUtensorMapDataType, driver.CUtensorMapL2promotion
    promotion = {128: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B, 256: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B}
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element_size == 1 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    buffer, begin = aligned_buffer(TENSOR_MAP_BYTES)
    status = libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(begin),
        int(kind),
        dims,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * dims)(*sizes),
        (ctypes.c_uint64 * (dims - 1))(*strides),
        (ctypes.c_uint32 * dims)(*box),
        (ctypes.c_uint32 * dims)(*[1] * dims),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(promotion[l2_fetch]),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    check(status, f"tensor map of {' x '.join(map(str, reversed(sizes)))}")
    encoded = ctypes.string_at(begin, TENSOR_MAP_BYTES)
    del buffer  # keeps the memory at `begin` alive until here
    return encoded


def bind_context(device_index: int) -> None:
    """Set the context of the calling thread to that of its current device. A thread has none before its first call."""
    from cuda.bindings import driver

    what = f"context of device {device_index}"
    if not int(check(*driver.cuCtxGetCurrent(), what)):
        device = check(*driver.cuDeviceGet(device_index), what)
        context = check(*driver.cuDevicePrimaryCtxRetain(device), what)
        (status,) = driver.cuCtxSetCurrent(context)
        check(status, what)


def check(status: Any, *rest: Any) -> Any:
    """Check the status of a driver call. Returns the value that the driver returned with it, if any.

    Args:
        rest: the driver's values, then a description of the call for the message.
    Raises:
        LaunchError: the status is an error.
    """
    from cuda.bindings import driver

    *values, what = rest
    status = driver.CUresult(status)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise LaunchError(
            f"The CUDA driver refused the {what}: {text.decode()} ({status}). Check with nvidia-smi that the driver "
            "works and supports PyTorch's CUDA version, run again, and report this with the whole log if it comes back."
        )
    return values[0] if values else None
