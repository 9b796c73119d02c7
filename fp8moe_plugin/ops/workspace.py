"""Allocation of scratch memory. All ops allocate it here, so that tests and FP8MOE_DEBUG=1 can poison it."""

import torch

from fp8moe_plugin.ops.checks import debugs, poison


def scratch(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    """Returns uint8 `[nbytes]` on the device of `like`, see `empty`. The caller may free it after the last launch."""
    buffer = like.new_empty(nbytes, dtype=torch.uint8)
    return poison(buffer) if debugs(buffer.is_cuda) else buffer


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns uninitialized scratch: the caller writes every element that is read later. FP8MOE_DEBUG=1 poisons it."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    return poison(buffer) if debugs(buffer.is_cuda) else buffer
