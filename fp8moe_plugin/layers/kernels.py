"""Everything a layer's kernel launches need, made ready while weights are loaded and before any CUDA graph."""

from dataclasses import dataclass

import torch

from fp8moe_plugin.jit import launcher
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.plan import linear_kernels, moe_kernels


@dataclass(frozen=True)
class LinearShape:
    """A dense layer as one rank holds it: `[N, K]`."""

    n: int
    k: int


@dataclass(frozen=True)
class MoEShape:
    """A mixture-of-experts layer as one rank holds it; `batched`: an all-to-all hands over rows sorted by expert."""

    local_experts: int
    global_experts: int
    topk: int
    hidden: int
    intermediate: int
    batched: bool


def prepare_kernels(shape: LinearShape | MoEShape, max_num_tokens: int, device: torch.device) -> int:
    """Compile (or read from the cache) and load every kernel that a layer of this shape launches.

    Returns:
        How many kernels this process has loaded, for all layers so far.
    Raises:
        CompileError, LaunchError: a kernel does not compile or load.
    """
    probe = torch.empty(0, device=device)
    if uses_sm90(probe):
        for ue8m0 in (False, True):
            keys = moe_kernels(ue8m0, shape.batched) if isinstance(shape, MoEShape) else linear_kernels(ue8m0)
            for key in keys:
                launcher.load(key, probe.device.index)
    return launcher.counts.loaded
