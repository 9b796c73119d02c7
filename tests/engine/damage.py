"""Changes of the tensors of a checkpoint, by which it becomes another one or a damaged one."""

from collections.abc import Callable

import torch

Change = Callable[[str, torch.Tensor], torch.Tensor | None]  # of a tensor by its name; None: it is left out


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.clone()
    damaged.view(torch.uint8)[-1, -2:] = 0xFF
    return damaged


def only(target: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    """Returns a change of the tensors whose names contain the target."""
    return lambda name, tensor: change(tensor) if target in name else tensor
