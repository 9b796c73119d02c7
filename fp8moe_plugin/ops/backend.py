"""Which implementation serves a tensor: our SM90 kernels, or the plain-torch reference."""

import functools
import logging

import torch

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.plan import HOPPER
from fp8moe_plugin.settings import settings

logger = logging.getLogger("fp8moe")


def uses_sm90(tensor: torch.Tensor) -> bool:
    """True if an op on this tensor runs our kernels.

    Raises:
        UnsupportedError: `FP8MOE_BACKEND=sm90`, and this is no Hopper GPU; or the reference is to be captured in a
            CUDA graph.
    """
    if _device_uses_sm90(tensor.device):
        return True
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "The plain-torch reference reads values back to the host, which no CUDA graph can hold. "
            "Run without graphs: --enforce-eager in vLLM."
        )
    return False


@functools.cache
def _device_uses_sm90(device: torch.device) -> bool:
    wanted = settings().backend
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if wanted == "reference" or (wanted == "auto" and capability != HOPPER):
        why = "FP8MOE_BACKEND=reference" if wanted == "reference" else f"no Hopper GPU behind device {device}"
        logger.warning("fp8moe: the plain-torch reference serves device %s (%s); it is slow", device, why)
        return False
    if capability != HOPPER:
        raise UnsupportedError(
            f"FP8MOE_BACKEND=sm90 needs a Hopper GPU (compute capability 9.0), device {device} has {capability}. "
            "Unset it, or set FP8MOE_BACKEND=reference to run the slow plain-torch reference."
        )
    return True
