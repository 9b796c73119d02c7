"""Launch kernels on torch's current stream through the CUDA driver; a launch costs the host few microseconds."""

import ctypes
import functools
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fp8moe_plugin.errors import LaunchError
from fp8moe_plugin.jit.lookup import WARMUP, Origin, find_or_compile
from fp8moe_plugin.plan.catalog import KernelKey
from fp8moe_plugin.plan.parameters import PARAMETERS, Kind

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
FORMATS = {Kind.MAP: f"{TENSOR_MAP_BYTES}s", Kind.POINTER: "P", Kind.INT: "i"}  # as `struct` packs a parameter

Argument = bytes | int


class Launch(NamedTuple):
    """A kernel with its arguments, ready for `launch` on any stream of the device that the arguments belong to."""

    key: KernelKey
    grid: int | tuple[int, int]
    args: tuple[Argument, ...]  # from `key.arguments`
    early: bool = False
    cluster: int = 1


def launch(
    key: KernelKey,
    grid: int | tuple[int, int],
    args: tuple[Argument, ...],
    device_index: int,
    early: bool = False,
    cluster: int = 1,
) -> None:
    """Launch a kernel on the current stream of a device; it is compiled and loaded the first time.

    Args:
        grid: blocks, along x or along (x, y).
        args: in the order of `plan.parameters.PARAMETERS`: a `tensor_map`, an address (0: none) or a 32-bit int each.
        early: it may start before the preceding kernel has ended, as soon as that kernel allows it (programmatic
            dependent launch; csrc/device/common.cuh has the rules for such kernels).
        cluster: blocks of a cluster along x, of a kernel that leaves that to its launch.
    Raises:
        CompileError: the kernel does not compile.
        LaunchError: the driver refuses it, or it is not loaded yet while the stream is being captured.
        struct.error: the arguments are not of the kinds of the kernel's parameters, or do not fit.
    """
    if device_index != torch._C._cuda_getDevice():
        with torch.cuda.device(device_index):
            return launch(key, grid, args, device_index, early, cluster)
    # By identity: hashing a key takes longer than the rest, and `plan` makes each key once.
    how = (id(key), device_index, early, cluster)
    prepared = _thread.prepared.get(how) or _thread.prepared.setdefault(how, _prepare(key, *how[1:]))
    config = prepared.config
    config.gridDimX, config.gridDimY = grid if isinstance(grid, tuple) else (grid, 1)
    config.hStream = torch._C._cuda_getCurrentRawStream(device_index)
    prepared.pack(*args)
    if status := prepared.call():
        _check(status, f"launch of {key.source} with grid {grid}")


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`, whose value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        ("gridDimX", ctypes.c_uint),
        ("gridDimY", ctypes.c_uint),
        ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint),
        ("blockDimY", ctypes.c_uint),
        ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(LaunchAttribute)),
        ("numAttrs", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """All that a thread needs to launch one kernel on one device; what it writes, no other thread does.

    The driver copies the parameters before the launch returns, so the next one may write over them.
    """

    key: KernelKey  # held, so that no other key gets its id
    config: LaunchConfig
    pack: Callable[..., None]  # its arguments to where `call` reads the parameters
    call: Callable[[], int]  # the driver's launch, which returns its status


class _Thread(threading.local):
    """What each thread has prepared; it has a context as soon as that is anything."""

    def __init__(self) -> None:
        self.prepared: dict[tuple[int, int, bool, int], _Prepared] = {}


_thread = _Thread()


def _prepare(key: KernelKey, device_index: int, early: bool, cluster: int) -> _Prepared:
    """Get ready to launch a kernel from this thread, on its current device."""
    _bind_context(device_index)
    function = ctypes.c_void_p(int(load(key, device_index)))
    pack, pointers = packer(key)
    config = LaunchConfig(1, 1, 1, key.threads, 1, 1, key.smem_bytes)
    attributes = [_early_launch()] * early + [_of_clusters(cluster)] * (cluster > 1)
    config.attrs, config.numAttrs = (LaunchAttribute * len(attributes))(*attributes), len(attributes)
    call = functools.partial(_libcuda().cuLaunchKernelEx, ctypes.byref(config), function, pointers, None)
    return _Prepared(key, config, pack, call)


def _early_launch() -> LaunchAttribute:
    from cuda.bindings import driver

    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    return LaunchAttribute(int(kind), b"", (ctypes.c_int * 16)(1))


def _of_clusters(blocks: int) -> LaunchAttribute:
    from cuda.bindings import driver

    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    return LaunchAttribute(int(kind), b"", (ctypes.c_int * 16)(blocks, 1, 1))


def packer(key: KernelKey) -> tuple[Callable[..., None], ctypes.Array[ctypes.c_void_p]]:
    """A function that writes a kernel's arguments to memory of its own, and the address of each of them there."""
    formats = [FORMATS[parameter.kind] for parameter in PARAMETERS[key.source]]
    ends = [struct.calcsize("".join(formats[: i + 1])) for i in range(len(formats))]
    room, offset = _aligned(ends[-1])
    begin = ctypes.addressof(room) + offset
    addresses = [begin + end - struct.calcsize(form) for end, form in zip(ends, formats, strict=True)]
    pack = functools.partial(struct.Struct("".join(formats)).pack_into, room, offset)
    return pack, (ctypes.c_void_p * len(addresses))(*addresses)


def _aligned(size: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Memory, and where in it `size` bytes begin that are aligned as a tensor map must be."""
    room = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGNMENT)
    return room, -ctypes.addressof(room) % TENSOR_MAP_ALIGNMENT


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
def tensor_map(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_size: int,
    l2_fetch: int,
) -> bytes:
    """A TMA descriptor (`CUtensorMap`), 128-byte swizzled, as an argument of `launch`.

    Args:
        sizes: elements along each dimension, the innermost first; its elements follow one another.
        strides: bytes from one to the next along each dimension but the innermost.
        box: elements of a load or store along each dimension; 128 bytes along the innermost.
        l2_fetch: bytes that L2 fetches where a load finds nothing there, 128 or 256.
    Raises:
        LaunchError: the driver refuses it.
    """
    from cuda.bindings import driver

    dims, kinds, promotions = len(sizes), driver.CUtensorMapDataType, driver.CUtensorMapL2promotion
    promotion = {128: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B, 256: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B}
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if element_size == 1 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    room, offset = _aligned(TENSOR_MAP_BYTES)
    begin = ctypes.addressof(room) + offset
    status = _libcuda().cuTensorMapEncodeTiled(
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
    _check(status, f"tensor map of {' x '.join(map(str, reversed(sizes)))}")
    return ctypes.string_at(begin, TENSOR_MAP_BYTES)


def _bind_context(device_index: int) -> None:
    """Give the calling thread the context of its current device; it has none before its first CUDA call."""
    from cuda.bindings import driver

    what = f"context of device {device_index}"
    if not int(_check(*driver.cuCtxGetCurrent(), what)):
        device = _check(*driver.cuDeviceGet(device_index), what)
        context = _check(*driver.cuDevicePrimaryCtxRetain(device), what)
        (status,) = driver.cuCtxSetCurrent(context)
        _check(status, what)


@functools.cache
def _libcuda() -> ctypes.CDLL:
    # cuda-bindings takes 20 us to pack a launch, and encodes tensor maps where they need not be aligned as asked
    return ctypes.CDLL("libcuda.so.1")


def _check(status: Any, *rest: Any) -> Any:
    """The value the driver returned beside `status`, if any; `rest` ends with what was tried."""
    from cuda.bindings import driver

    *values, what = rest
    status = driver.CUresult(status)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise LaunchError(
            f"The CUDA driver refused the {what}: {text.decode()} ({status}). Check with nvidia-smi that the driver "
            "works and supports CUDA 13, run again, and report this with the whole log if it comes back."
        )
    return values[0] if values else None
