"""Preparation of a layer's kernels while weights are loaded, before any CUDA graph is captured."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from fp8moe_plugin.checkpoint.placement import dense_kind_refusal
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit import driver
from fp8moe_plugin.jit.lookup import compiler_of, place
from fp8moe_plugin.launches.backend import Backend
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.ops.devices import backend_of
from fp8moe_plugin.plan.keys import SM90, KernelKey

NO_KERNELS = "none"  # in place of their compiler, in the metrics of the reference
logger = logging.getLogger("fp8moe")

_announced: set[tuple[str, str]] = set()  # backends and layouts that were logged


def prepare_kernels(keys: Iterable[KernelKey], weight: torch.Tensor, warmup: str) -> driver.LoadCounts:
    """Find (or compile) these kernels and load them on the device of a layer's weight.

    The plain-torch reference needs no kernels.

    Args:
        warmup: the command that compiles them in advance.
    Returns:
        The number and the origins of the kernels that this process has loaded so far, for all its layers.
    Raises:
        KernelNotPrecompiled: a kernel would have to be compiled, which `FP8MOE_JIT=forbid` forbids.
        CompileError, LaunchError: a kernel does not compile or load.
    """
    if backend_of(weight):
        for key in keys:
            driver.load(key, weight.device.index, warmup)
    return driver.counts


def prepare_dense_kernels(layer: Any, weights: WeightFormat, ue8m0: bool, warmup: str) -> None:
    """Prepare the kernels of an engine's dense layer with our method. Raises like `prepare_kernels`."""
    weight, biased = layer.weight, getattr(layer, "bias", None) is not None
    keys = kernels_backend(weight).dense_kernels(ue8m0, weights, biased)
    metrics.update(prepare_kernels(keys, weight, warmup))


def backend_name(tensor: torch.Tensor) -> str:
    """Returns the name, in log and metrics, of the backend for a layer whose tensors are on this tensor's device."""
    backend = backend_of(tensor)
    return backend.name if backend else "reference"


def kernels_backend(tensor: torch.Tensor) -> Backend:
    """Returns the backend of the kernels for a layer whose tensors are on this tensor's device.

    For the reference, which loads no kernels, this is the backend of Hopper GPUs.
    """
    return backend_of(tensor) or BACKENDS[SM90]


def dense_format_refusal(weights: WeightFormat) -> str | None:
    """Returns why the backend of new tensors does not compute dense layers in a format, or None if it does."""
    backend = backend_of(torch.empty(0))
    return dense_kind_refusal(weights, f"{backend.name} " if backend else "")


def announce_layer(name: str, weight: torch.Tensor, layout: str, kernels: driver.LoadCounts) -> None:
    """Count a layer of experts that is ready, and log the first one of its backend and layout.

    Args:
        layout: of the rows of tokens, the value of an `Arrival`.
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
    target = kernels_backend(weight).target
    compilers = {compiler_of(origin, target) for origin in kernels.origins}
    metrics.count_build(compilers or {NO_KERNELS}, backend)
    metrics.count_layer(name, backend, layout)
    metrics.update(kernels)
