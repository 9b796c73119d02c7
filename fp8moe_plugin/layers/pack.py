"""Experts in MXFP4 that stay in MXFP4: a projection is packed once its codes and exponents have arrived.

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
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.mxfp4 import further_steps, steps_of, widened
from fp8moe_plugin.ops.pack_mxfp4 import PARTS, pack_mxfp4, padded_blocks, write

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
    own = tensor.view(torch.uint8)
    if share.ranks == 1:
        return own
    dim, unit = (1, MXFP4.tensor(role).block[1]) if down else (0, 1)
    part = local_intermediate(share.intermediate, share.ranks) // unit
    width = own.shape[dim]
    start, end = (min(at * part, width) for at in (share.rank, share.rank + 1))
    return own.narrow(dim, start, end - start)


def pack(
    name: str,
    parameters: tuple[torch.Tensor, torch.Tensor],
    slots: Iterable[int],
    shard_id: str,
    both: tuple[torch.Tensor, torch.Tensor],
    *,
    running: bool,
    balanced: bool,
) -> None:
    """Pack a rank's part of a projection, without a wait for the GPU unless its exponents are far apart.

    Args:
        name: the projection's, for messages.
        parameters: those of w13 or w2. They grow to have room for the projection's steps.
        slots: those of the parameters' experts that hold it.
        shard_id: "w1" (gate), "w2" (down) or "w3" (up).
        both: its codes, on the parameters' device, and its exponents, on any device.
        running: whether CUDA graphs may have the addresses of the parameters, so they cannot grow.
        balanced: whether ranks exchange experts.
    Raises:
        CheckpointError: an exponent is NaN or too large, or a running layer has no room for the steps.
        UnsupportedError: the projection has further steps, and ranks exchange experts.
    """
    codes, exponents = both
    found = check_exponents(name, exponents)
    exponents = to_device(exponents, codes.device)
    if found.span <= SPAN:
        for slot in slots:
            pack_mxfp4(*_expert(parameters, slot), shard_id, codes, exponents, found.highest)
        return
    steps = steps_of(padded_blocks(*_expert(parameters, 0), shard_id, codes, exponents))
    _make_room(name, parameters, shard_id, steps.extra, running=running, balanced=balanced)
    for slot in slots:
        write(*_expert(parameters, slot), shard_id, steps)


def _expert(parameters: tuple[torch.Tensor, torch.Tensor], slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight and the scales of an expert, with a dimension for it."""
    weight, scales = parameters
    return weight.data[slot : slot + 1], scales.data[slot : slot + 1]


def _make_room(
    name: str,
    parameters: tuple[torch.Tensor, torch.Tensor],
    shard_id: str,
    extra: int,
    *,
    running: bool,
    balanced: bool,
) -> None:
    """Make room for the further steps of a projection."""
    _, parts = PARTS[shard_id]
    further, room = extra * parts, further_steps(*parameters)
    if further and balanced:
        raise UnsupportedError(
            f"{name}: the exponents of 128 rows differ by more than expert load balancing can serve. Restart "
            "without --enable-eplb, or with FP8MOE_FP4_EXPERTS=fp8."
        )
    if running:
        check_room(name, further, room)
    if further > room:
        grow(name, *parameters, shard_id != "w2", further)


def check_room(name: str, needed: int, room: int) -> None:
    """Raise `CheckpointError` if a load needs more further steps than the parameters that kernels read have."""
    if needed > room:
        raise CheckpointError(
            f"{name}: the exponents of these weights need {needed} further steps of K, but the running layer has "
            f"room for {room}. Restart the engine to load them."
        )


def grow(name: str, weight: torch.Tensor, scales: torch.Tensor, gate_up: bool, further: int) -> None:
    """Give the parameters of w13 or w2 room for this number of further steps.

    Their values wait on the host, so a GPU never holds more than the result.
    """
    logger.info(
        "%s: exponents of 128 rows differ by more than %d, so the weights of this layer take %d steps of K more",
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
