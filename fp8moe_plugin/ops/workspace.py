"""The one place where ops allocate scratch, so that a test can poison it."""

import torch


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized scratch; whoever takes it writes every element that is read later."""
    return torch.empty(shape, dtype=dtype, device=device)
