"""The one place where ops allocate scratch, so that a test can poison it."""

import torch

from fp8moe_plugin.ops.checks import debugs, poison


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized scratch; whoever takes it writes every element that is read later. FP8MOE_DEBUG=1 poisons it."""
    scratch = torch.empty(shape, dtype=dtype, device=device)
    return poison(scratch) if debugs(scratch.is_cuda) else scratch
