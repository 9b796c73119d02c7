"""The backend of each target, and the choice of a backend for a device."""

from fp8moe_plugin.launches.backend import Backend
from fp8moe_plugin.launches.sm90 import Sm90
from fp8moe_plugin.launches.triton import Triton
from fp8moe_plugin.plan.keys import HOPPER, SM90
from fp8moe_plugin.plan.triton.catalog import TARGETS, target_of

BACKENDS: dict[str, Backend] = {SM90: Sm90(), **{target: Triton(target) for target in TARGETS}}


def choose_backend(wanted: str, capability: tuple[int, int] | None) -> tuple[Backend | None, str | None]:
    """Returns the backend that FP8MOE_BACKEND names (None: the reference), and what it lacks if it cannot run.

    Args:
        wanted: the value of FP8MOE_BACKEND.
        capability: the compute capability of an NVIDIA GPU, None for other devices.
    """
    if wanted == "reference" or (wanted == "auto" and capability is None):
        return None, None
    if wanted == "sm90" or (wanted == "auto" and capability == HOPPER):
        need = "the SM90 kernels need a Hopper GPU (compute capability 9.0)"
        return BACKENDS[SM90], None if capability == HOPPER else need
    if target := target_of(capability):
        return BACKENDS[target], None
    served = ", ".join(f"{major}.{minor}" for (major, minor), _ in TARGETS.values())
    return None, f"the Triton kernels need an NVIDIA GPU with FP8 (compute capability {served})"
