"""Everything a layer's kernel launches need, made ready while weights are loaded and before any CUDA graph."""

import logging

import torch

from fp8moe_plugin.jit import driver
from fp8moe_plugin.jit.lookup import place
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.ops.backend import kernel_target
from fp8moe_plugin.plan import KernelKey
from fp8moe_plugin.plan.catalog import SM90
from fp8moe_plugin.plan.triton_catalog import is_triton

logger = logging.getLogger("fp8moe")

_announced: set[tuple[str, str]] = set()  # backends and layouts that were logged


def prepare_kernels(keys: list[KernelKey], weight: torch.Tensor, warmup: str) -> driver.LoadCounts:
    """Find (or compile) these kernels and load them on the device of a layer's weight.

    The plain-torch reference needs none.

    Args:
        warmup: the command that compiles them before.
    Returns:
        How many kernels this process has loaded so far, for all its layers, and where they came from.
    Raises:
        KernelNotPrecompiled: a kernel would have to be compiled, which `FP8MOE_JIT=forbid` forbids.
        CompileError, LaunchError: a kernel does not compile or load.
    """
    if kernel_target(weight):
        for key in keys:
            driver.load(key, weight.device.index, warmup)
    return driver.counts


def backend_name(tensor: torch.Tensor) -> str:
    """What computes a layer whose tensors are where this one is, as log and metrics name it."""
    target = kernel_target(tensor)
    return "reference" if target is None else "triton" if is_triton(target) else "sm90"


def target_of_layer(tensor: torch.Tensor) -> str:
    """The target of the kernels of a layer whose tensors are where this one is; the reference loads none of them."""
    return kernel_target(tensor) or SM90


def announce_layer(name: str, weight: torch.Tensor, layout: str, kernels: driver.LoadCounts) -> None:
    """Count a layer of experts that is ready, and log the first one of its backend and layout.

    Args:
        layout: of the rows of tokens, "contiguous" or "masked".
        kernels: the result of `prepare_kernels`.
    """
    backend = backend_name(weight)
    if (backend, layout) not in _announced:
        _announced.add((backend, layout))
        origins = [f"{number} from the {origin}{place(origin)}" for origin, number in kernels.origins.items()]
        logger.info(
            "fp8moe serves the experts: backend %s, layout %s, %d kernels loaded in %.2f s (%s)",
            *(backend, layout, kernels.loaded, kernels.seconds, ", ".join(origins) or "none needed"),
        )
    metrics.count_layer(name, backend, layout)
    metrics.update(kernels)
