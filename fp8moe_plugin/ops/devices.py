"""The choice of implementation for a tensor: SM90 or Triton kernels on a `Device`, or the reference.

Ops access the device only through `device_of`. Tests replace it to record launches, or to run them on an emulator. In
the modules of the ops, `prepared_x` makes launches with slots instead of addresses, and prepares them once for all
calls of the same shapes. Only the callables that `Device.prepare` returns launch kernels.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.jit import launcher
from fp8moe_plugin.jit.launch import Launch
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.backend import Backend
from fp8moe_plugin.launches.backends import BACKENDS, choose_backend
from fp8moe_plugin.launches.tuning_file import has_no_thresholds, tuning_of, tuning_path
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.parameters import PARAMETERS, Kind
from fp8moe_plugin.plan.tuning import MULTIPROCESSORS
from fp8moe_plugin.settings import settings

logger = logging.getLogger("fp8moe")
NO_TRITON_KERNEL = (
    "{} has no Triton kernel, but Triton kernels serve this GPU. Unset FP8MOE_BACKEND if it is a Hopper GPU, for which "
    "there is a CUDA kernel."
)
MOST_PREPARED = 1024  # prepared calls that an op caches, one for each shape and number of tokens
Choices = ParamSpec("Choices")
Ready = TypeVar("Ready")


class Device(Protocol):
    """A device that runs kernels. Devices are compared by identity: prepared launches belong to one of them."""

    @property
    def multiprocessors(self) -> int: ...

    @property
    def backend(self) -> Backend: ...

    def __hash__(self) -> int: ...

    def prepare(self, launches: Iterable[Launch]) -> Prepared:
        """Returns a callable that launches these kernels in order on the current stream, given the slots' addresses."""
        ...


@dataclass(frozen=True, eq=False)
class Gpu:
    """An NVIDIA GPU."""

    index: int
    multiprocessors: int
    backend: Backend = BACKENDS[SM90]

    def prepare(self, launches: Iterable[Launch]) -> Prepared:
        """See `launcher.prepare`."""
        return launcher.prepare(launches, self.index)


@dataclass(frozen=True, eq=False)
class _Limited:
    """A GPU that uses only some of its multiprocessors, see `set_num_sms`."""

    gpu: Device
    multiprocessors: int

    @property
    def backend(self) -> Backend:
        return self.gpu.backend

    def prepare(self, launches: Iterable[Launch]) -> Prepared:
        """See `Gpu.prepare`. Kernels do not overlap: two overlapping kernels would each use the full SM limit."""
        return self.gpu.prepare(launch._replace(pdl=False) for launch in launches)


@dataclass(frozen=True, eq=False)
class _Printing:
    """A device that prints the kernels that an op prepares."""

    device: Device
    op: str

    @property
    def multiprocessors(self) -> int:
        return self.device.multiprocessors

    @property
    def backend(self) -> Backend:
        return self.device.backend

    def prepare(self, launches: Iterable[Launch]) -> Prepared:
        launches = tuple(launches)
        print(f"fp8moe: {self.op}: {'; '.join(map(described, launches))}", file=sys.stderr, flush=True)
        return self.device.prepare(launches)


def described(launch: Launch) -> str:
    """Returns a description of a launch: the kernel, its sizes and tile, the blocks of its grid."""
    names = (parameter.name for parameter in PARAMETERS[launch.key.source] if parameter.kind == Kind.INT)
    sizes = (f"{name}={getattr(launch.args, name)}" for name in names)
    cluster = (f"cluster={launch.cluster}",) if launch.cluster > 1 else ()
    return " ".join((str(launch.key), *sizes, f"grid={launch.grid}", *cluster))


def prepares(
    op: str,
) -> Callable[[Callable[Concatenate[Device, Choices], Ready]], "functools._lru_cache_wrapper[Ready]"]:
    """Decorates a function that prepares the launches of an op: it runs once for each device and arguments.

    With FP8MOE_PRINT_CONFIGS=1 the launches are also printed, under the name of the op.
    """

    def decorate(
        make: Callable[Concatenate[Device, Choices], Ready],
    ) -> "functools._lru_cache_wrapper[Ready]":
        @functools.lru_cache(maxsize=MOST_PREPARED)
        @functools.wraps(make)
        def prepared(device: Device, *args: Choices.args, **kwargs: Choices.kwargs) -> Ready:
            shown = _Printing(device, op) if settings().print_configs else device
            return make(shown, *args, **kwargs)

        return prepared

    return decorate


def device_of(tensor: torch.Tensor) -> Device | None:
    """Returns the device whose kernels compute an op on this tensor, or None for the reference.

    Raises:
        UnsupportedError: the kernels that `FP8MOE_BACKEND` names do not run on this GPU; or a CUDA graph is captured,
            which cannot contain the reference.
    """
    gpu = _gpu(tensor.device)
    if gpu is not None and _num_sms and not gpu.backend.limits_multiprocessors:
        log_once(logging.WARNING, "set_num_sms does not limit Triton kernels: they take all multiprocessors")
        return gpu
    if gpu is not None and _num_sms:
        return _limited(gpu, _num_sms)
    if gpu is None and tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "The plain-torch reference reads values back to the host, which no CUDA graph can hold. "
            "Run without graphs: --enforce-eager in vLLM, --disable-cuda-graph in SGLang."
        )
    return gpu


def sm90_device_of(tensor: torch.Tensor) -> Device | None:
    """Returns `device_of` for ops without a Triton kernel. Raises `UnsupportedError` if the backend is Triton, too."""
    device = device_of(tensor)
    if device is not None and not device.backend.has_all_ops:
        raise UnsupportedError(NO_TRITON_KERNEL.format(f"This op, on device {tensor.device},"))
    return device


def backend_of(tensor: torch.Tensor) -> Backend | None:
    """Returns the backend that computes an op on this tensor, None for the reference. Raises like `device_of`."""
    device = device_of(tensor)
    return device.backend if device else None


_num_sms = 0  # no limit


def set_num_sms(num_sms: int) -> None:
    """Limit the multiprocessors that later calls of all ops in this process use, to leave some to other kernels.

    The limit applies to the GEMMs and to an indexer's logits. Kernels that only move memory (routing, quantization, the
    weighted sum) use all multiprocessors for their few microseconds, and so do all Triton kernels. Prefill of packed
    MXFP4 uses an even number, at least 2. CUDA graphs keep the limit that they were captured with.

    Args:
        num_sms: 0: no limit. Values above the GPU's number of multiprocessors have no effect.
    Raises:
        InvalidInputError: it is negative, or not an int.
    """
    global _num_sms
    check_int("num_sms", num_sms)
    if num_sms < 0:
        raise InvalidInputError(f"num_sms is {num_sms}, needs 0 or more. Pass 0 for all multiprocessors.")
    _num_sms = num_sms


def get_num_sms() -> int:
    """Returns the number of multiprocessors that calls on the current GPU use.

    Without a GPU this is the limit, or the number of an H200.
    """
    if not torch.cuda.is_available():
        return _num_sms or MULTIPROCESSORS
    found = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return min(_num_sms or found, found)


@functools.cache
def _limited(gpu: Gpu, num_sms: int) -> Device:
    """Returns a device for this limit, always the same, so that prepared launches of other limits stay valid."""
    return _Limited(gpu, num_sms) if num_sms < gpu.multiprocessors else gpu


@functools.cache
def _gpu(device: torch.device) -> Gpu | None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    backend, need = choose_backend(settings().backend, capability)
    if need:
        raise UnsupportedError(
            f"FP8MOE_BACKEND={settings().backend}: {need}, but device {device} has {capability}. "
            "Unset it, or set FP8MOE_BACKEND=reference to run the slow plain-torch reference."
        )
    if backend is None:
        why = "FP8MOE_BACKEND=reference" if settings().backend == "reference" else f"device {device} is no GPU"
        logger.warning("fp8moe: the plain-torch reference serves device %s (%s); it is slow", device, why)
        return None
    gpu = torch.cuda.get_device_properties(device)
    return Gpu(device.index, gpu.multi_processor_count, _tuned(backend, gpu.name))


def _tuned(backend: Backend, gpu: str) -> Backend:
    if backend.target == SM90:
        return backend.tuned(tuning_of(gpu))
    if tuning_path():
        log_once(logging.WARNING, has_no_thresholds(gpu))
    return backend
