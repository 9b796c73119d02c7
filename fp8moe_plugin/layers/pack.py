"""Experts in MXFP4 that stay in MXFP4: each projection is packed as soon as its codes and exponents have arrived."""

import logging

import torch

from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.ops.mxfp4 import SPAN, Steps, further_steps, widened, write_down, write_half

logger = logging.getLogger("fp8moe")


def part_of_rank(
    role: Role, tensor: torch.Tensor, down: bool, intermediate: int, ranks: int, rank: int
) -> torch.Tensor:
    """Returns a rank's part of a projection's codes or exponents, as bytes, zero-padded to whole scale blocks.

    Args:
        down: the intermediate channels are columns.
    """
    dim, unit = (1, MXFP4.tensor(role).block[1]) if down else (0, 1)
    part, width = local_intermediate(intermediate, ranks) // unit, tensor.shape[dim]
    start, end = (min(at * part, width) for at in (rank, rank + 1))
    here = tensor.view(torch.uint8).narrow(dim, start, end - start)
    missing = part - (end - start)
    return torch.nn.functional.pad(here, (0, missing) if down else (0, 0, 0, missing))


def pack(name: str, weight: torch.Tensor, scales: torch.Tensor, expert: int, shard_id: str, steps: Steps) -> None:
    """Write a rank's part of a projection to the parameters of w13 or w2, which grow to have room for its steps.

    Args:
        shard_id: "w1" (gate), "w2" (down) or "w3" (up).
    """
    halves = 1 if shard_id == "w2" else 2
    if steps.extra * halves > further_steps(weight, scales):
        grow(name, weight, scales, halves == 2, steps.extra * halves)
    target = weight.data[expert], scales.data[expert]
    if shard_id == "w2":
        write_down(*target, steps)
    else:
        write_half(*target, int(shard_id == "w3"), steps)


def grow(name: str, weight: torch.Tensor, scales: torch.Tensor, gate_up: bool, further: int) -> None:
    """Give the parameters of w13 or w2 room for so many further steps."""
    logger.info(
        "%s: exponents of a 128x128 block differ by more than %d, so the weights of this layer take %d steps of K more",
        *(name, SPAN, further),
    )
    weight.data, scales.data = widened(weight.data, scales.data, gate_up, further)
