"""Constant tables on a device for loading weights: made when first needed, and forgotten when a load has ended.

Engines may discard all memory that was allocated while they loaded weights, as vLLM does in its second level of sleep.
A table from before would then hold anything, and the next weights would be wrong without an error.
"""

import functools
from collections.abc import Callable

import torch

Make = Callable[[torch.device], torch.Tensor]

_kept: dict[tuple[Make, torch.device], torch.Tensor] = {}


def table(make: Make) -> Make:
    """Decorates a function that makes a table, so that it is made once for each load and device."""

    @functools.wraps(make)
    def kept(device: torch.device) -> torch.Tensor:
        if (make, device) not in _kept:
            _kept[make, device] = make(device)
        return _kept[make, device]

    return kept


def forget_tables() -> None:
    """Forget all tables, because a layer's load has ended."""
    _kept.clear()
