"""Experts in MXFP4 that stay in MXFP4: each projection is packed as soon as its codes and exponents have arrived.

Every rank receives the whole projection and takes its part first. Parameters have one expert per index of their first
dimension, as EPLB needs them. They have no room for further steps (ops/mxfp4.py) until an expert needs some; then those
of its layer grow. New weights that need more of them than the parameters of a running layer have are refused, since
CUDA graphs have their addresses, and so is EPLB with them, because all ranks would need the same number.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.recode import check_exponents, to_device
from fp8moe_plugin.ops.fp4_blocks import SPAN, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import Steps, further_steps, steps_of, widened, write_down, write_half

logger = logging.getLogger("fp8moe")


class Share(NamedTuple):
    """The part of each expert that a rank holds."""

    intermediate: int  # channels on all ranks
    ranks: int
    rank: int


def part_of_rank(role: Role, tensor: torch.Tensor, down: bool, share: Share) -> torch.Tensor:
    """Returns a rank's part of a projection's codes or exponents, as bytes. The last ranks may have less or nothing.

    Args:
        down: the intermediate channels are columns.
    """
    dim, part = _part(role, down, share)
    width = tensor.shape[dim]
    start, end = (min(at * part, width) for at in (share.rank, share.rank + 1))
    return tensor.view(torch.uint8).narrow(dim, start, end - start)


def _padded(role: Role, tensor: torch.Tensor, down: bool, share: Share) -> torch.Tensor:
    """Returns what `part_of_rank` does, zero-padded to whole scale blocks."""
    dim, part = _part(role, down, share)
    missing = part - tensor.shape[dim]
    return torch.nn.functional.pad(tensor, (0, missing) if down else (0, 0, 0, missing)) if missing else tensor


def _part(role: Role, down: bool, share: Share) -> tuple[int, int]:
    """Returns the dimension of the intermediate channels and the size of a rank's part."""
    dim, unit = (1, MXFP4.tensor(role).block[1]) if down else (0, 1)
    return dim, local_intermediate(share.intermediate, share.ranks) // unit


def pack(
    name: str,
    parameters: tuple[torch.Tensor, torch.Tensor],
    slots: Iterable[int],
    shard_id: str,
    both: tuple[torch.Tensor, torch.Tensor],
    share: Share,
    *,
    running: bool,
    balanced: bool,
) -> None:
    """Write a rank's part of a projection to the parameters of w13 or w2, which grow to have room for its steps.

    Args:
        name: the projection's, for messages.
        slots: those of the parameters' experts that hold it.
        shard_id: "w1" (gate), "w2" (down) or "w3" (up).
        both: the rank's part of its codes, on the parameters' device, and exponents, on any device.
        running: whether CUDA graphs may have the addresses of the parameters, so they cannot grow.
        balanced: whether ranks exchange experts.
    Raises:
        CheckpointError: an exponent is NaN or too large, or a running layer has no room for its steps.
        UnsupportedError: it has further steps, and ranks exchange experts.
    """
    weight, scales = parameters
    down, halves = (True, 1) if shard_id == "w2" else (False, 2)
    most = check_exponents(name, both[1])
    own = both[0], to_device(both[1], both[0].device)
    codes, exponents = (_padded(role, half, down, share) for role, half in zip(Role, own, strict=True))
    steps = steps_of(Fp4Blocks.of(codes, exponents, most))
    further = steps.extra * halves
    if further and balanced:
        raise UnsupportedError(
            f"{name}: the exponents of a block differ by more than expert load balancing can serve. Restart without "
            "--enable-eplb, or with FP8MOE_FP4_EXPERTS=fp8."
        )
    if running:
        check_room(name, further, further_steps(weight, scales))
    if further > further_steps(weight, scales):
        grow(name, weight, scales, halves == 2, further)
    for slot in slots:
        write(weight.data[slot], scales.data[slot], shard_id, steps)


def write(weight: torch.Tensor, scales: torch.Tensor, shard_id: str, steps: Steps) -> None:
    """Write a projection of an expert, or of several, to their part of the parameters."""
    if shard_id == "w2":
        write_down(weight, scales, steps)
    else:
        write_half(weight, scales, int(shard_id == "w3"), steps)


def check_room(name: str, needed: int, room: int) -> None:
    """Raise `CheckpointError` if a load needs more further steps than the parameters that kernels read have."""
    if needed > room:
        raise CheckpointError(
            f"{name}: the exponents of these weights need {needed} further steps of K, but the running layer has "
            f"room for {room}. Restart the engine to load them."
        )


def grow(name: str, weight: torch.Tensor, scales: torch.Tensor, gate_up: bool, further: int) -> None:
    """Give the parameters of w13 or w2 room for so many further steps.

    Their values wait on the host, so a GPU never holds more than the result.
    """
    logger.info(
        "%s: exponents of a 128x128 block differ by more than %d, so the weights of this layer take %d steps of K more",
        *(name, SPAN, further),
    )
    parameters = weight, scales
    before = [parameter.data.to("cpu", copy=True) for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)  # frees the memory
    for expert, (codes, bases) in enumerate(zip(*before, strict=True)):
        wide = widened(codes[None], bases[None], gate_up, further)
        for parameter, (tensor,) in zip(parameters, wide, strict=True):
            if not parameter.numel():
                parameter.data = parameter.data.new_empty(len(before[0]), *tensor.shape)
            parameter.data[expert] = tensor
