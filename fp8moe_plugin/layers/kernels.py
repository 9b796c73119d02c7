"""Everything a layer's kernel launches need, made ready while weights are loaded and before any CUDA graph."""

import torch

from fp8moe_plugin.jit import driver
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.plan import KernelKey


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
    if uses_sm90(weight):
        for key in keys:
            driver.load(key, weight.device.index, warmup)
    return driver.counts
