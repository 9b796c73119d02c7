"""Which implementation serves a tensor: our SM90 kernels on a `Device`, or the plain-torch reference.

All that ops know of the device they launch on goes through `device_of`: tests replace it to record launches, and to run
them on an emulator. In the modules of the ops `x_launch` and `x_launches` return launches, whose addresses are slots;
`prepared_x` makes them ready once for calls of the same shapes, and only what `Device.prepare` returns acts.
"""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.jit import launcher
from fp8moe_plugin.jit.launch import Launch
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.plan import HOPPER
from fp8moe_plugin.settings import settings

logger = logging.getLogger("fp8moe")
MOST_PREPARED = 1024  # calls that an op keeps ready, one for each shape and number of tokens


class Device(Protocol):
    """What runs the kernels. Devices are compared by identity: what is prepared belongs to one of them."""

    @property
    def multiprocessors(self) -> int: ...

    def __hash__(self) -> int: ...

    def prepare(self, launches: Iterable[Launch]) -> Prepared:
        """A function of the addresses for the slots that launches kernels on the current stream, in this order."""
        ...


@dataclass(frozen=True, eq=False)
class Gpu:
    """A Hopper GPU."""

    index: int
    multiprocessors: int

    def prepare(self, launches: Iterable[Launch]) -> Prepared:
        """See `launcher.prepare`."""
        return launcher.prepare(launches, self.index)


def device_of(tensor: torch.Tensor) -> Device | None:
    """The device whose kernels serve an op on this tensor; None: the reference does.

    Raises:
        UnsupportedError: `FP8MOE_BACKEND=sm90`, but this is not a Hopper GPU; or the reference is to be captured in a
            CUDA graph.
    """
    gpu = _gpu(tensor.device)
    if gpu is None and tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "The plain-torch reference reads values back to the host, which no CUDA graph can hold. "
            "Run without graphs: --enforce-eager in vLLM, --disable-cuda-graph in SGLang."
        )
    return gpu


def uses_sm90(tensor: torch.Tensor) -> bool:
    """Whether an op on this tensor runs our kernels. Raises what `device_of` raises."""
    return device_of(tensor) is not None


@functools.cache
def _gpu(device: torch.device) -> Gpu | None:
    wanted = settings().backend
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if wanted == "reference" or (wanted == "auto" and capability != HOPPER):
        why = "FP8MOE_BACKEND=reference" if wanted == "reference" else f"device {device} is not a Hopper GPU"
        logger.warning("fp8moe: the plain-torch reference serves device %s (%s); it is slow", device, why)
        return None
    if capability != HOPPER:
        raise UnsupportedError(
            f"FP8MOE_BACKEND=sm90 needs a Hopper GPU (compute capability 9.0), device {device} has {capability}. "
            "Unset it, or set FP8MOE_BACKEND=reference to run the slow plain-torch reference."
        )
    return Gpu(device.index, torch.cuda.get_device_properties(device).multi_processor_count)
