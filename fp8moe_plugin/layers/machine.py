"""Checks that this machine can serve: a supported GPU, a CPU, or an explicitly requested reference backend."""

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.launches.backends import choose_backend
from fp8moe_plugin.settings import BATCH_INVARIANT, NAME, batch_invariant, settings


def check_machine(device: str, capability: tuple[int, int] | None, eager: str) -> None:
    """Raise `UnsupportedError` unless this machine runs our kernels, or the reference is requested or runs on a CPU.

    Args:
        device: "cuda" for NVIDIA GPUs, "cpu", or the engine's name for another device.
        capability: the compute capability, if the device has one.
        eager: the engine's option that turns CUDA graphs off.
    """
    wanted = settings().backend
    nvidia = (capability[0], capability[1]) if capability and device == "cuda" else None
    backend, need = choose_backend(wanted, nvidia)
    if backend is None and need is None and wanted == "auto" and device != "cpu":
        need = "the kernels need an NVIDIA GPU with FP8"
    if backend is None and need is None and batch_invariant():
        raise UnsupportedError(
            f"{BATCH_INVARIANT}=1 is not supported on the plain-torch reference: in torch's matrix products, the order "
            "of summation depends on the number of tokens. Unset it, or serve on a GPU with our kernels."
        )
    if need:
        found = f"compute capability {capability[0]}.{capability[1]}" if capability else f"a {device}"
        # The reference copies values to the host, which is impossible in a CUDA graph.
        without_graphs = "" if device == "cpu" else f" with {eager}"
        raise UnsupportedError(
            f"--quantization {NAME} (FP8MOE_BACKEND={wanted}): {need}, but this machine has {found}. "
            "Use --quantization fp8, or set FP8MOE_BACKEND=reference to try the model on the slow plain-torch "
            f"reference{without_graphs}."
        )
