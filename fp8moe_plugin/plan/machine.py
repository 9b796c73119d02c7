"""Which backend serves a device."""

from fp8moe_plugin.plan.catalog import HOPPER
from fp8moe_plugin.plan.triton_catalog import TARGETS, target_of


def choose_backend(wanted: str, capability: tuple[int, int] | None) -> tuple[str, str | None]:
    """The backend that FP8MOE_BACKEND asks for, and what it needs if it cannot serve this device, else None.

    Args:
        wanted: the value of FP8MOE_BACKEND.
        capability: the compute capability of an NVIDIA GPU, None for other devices.
    """
    if wanted == "reference" or (wanted == "auto" and capability is None):
        return "reference", None
    if wanted == "sm90" or (wanted == "auto" and capability == HOPPER):
        need = "the SM90 kernels need a Hopper GPU (compute capability 9.0)"
        return "sm90", None if capability == HOPPER else need
    served = ", ".join(f"{major}.{minor}" for (major, minor), _ in TARGETS.values())
    need = f"the Triton kernels need an NVIDIA GPU with FP8 (compute capability {served})"
    return "triton", None if capability and target_of(capability) else need
