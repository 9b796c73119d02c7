"""The one place where ops allocate scratch, so that a test can poison it."""

import torch

from fp8moe_plugin.ops.checks import debugs, poison


def scratch(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    """uint8 `[nbytes]` on the device of `like`, as `empty`; it may be freed after the last launch that uses it."""
    room = like.new_empty(nbytes, dtype=torch.uint8)
    return poison(room) if debugs(room.is_cuda) else room


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized scratch; whoever takes it writes every element that is read later. FP8MOE_DEBUG=1 poisons it."""
    room = torch.empty(shape, dtype=dtype, device=device)
    return poison(room) if debugs(room.is_cuda) else room
