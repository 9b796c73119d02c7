"""Experts in MXFP4 that stay in MXFP4: projections are packed when the codes and exponents of several have arrived.

Packing one alone takes about sixty calls of torch, and the host needs several microseconds for each call.
Every rank receives the whole projection and takes its part first. Parameters have one expert per index of their first
dimension, as EPLB needs them. They have no room for further steps (ops/mxfp4.py) until an expert needs some; then those
of its layer grow. New weights that need more of them than the parameters of a running layer have are refused, since
CUDA graphs have their addresses, and so is EPLB with them, because all ranks would need the same number.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import CHUNK_BYTES, CODE_BYTES, MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.recode import Halves, check_exponents, to_device
from fp8moe_plugin.ops.fp4_blocks import SPAN, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import Steps, further_steps, steps_of, widened, write_down, write_half

logger = logging.getLogger("fp8moe")

BATCH_BYTES = 28 << 20  # of codes of a shard that wait to be packed at once
RUN_BYTES = 16 << 20  # of these that are written at once, which takes four times as much meanwhile


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
    dim, part = _part(role, down, share)
    width = own.shape[dim]
    start, end = (min(at * part, width) for at in (share.rank, share.rank + 1))
    return own.narrow(dim, start, end - start)


def _joined(role: Role, parts: list[torch.Tensor], down: bool, share: Share) -> torch.Tensor:
    """Returns what `part_of_rank` does for several projections as one matrix, each zero-padded to whole blocks."""
    _, part = _part(role, down, share)
    rows, columns = parts[0].shape
    missing = (part - columns, -rows % GROUP) if down else (0, part - rows)
    joined = torch.stack(parts) if len(parts) > 1 else parts[0][None]
    padded = torch.nn.functional.pad(joined, (0, missing[0], 0, missing[1])) if any(missing) else joined
    return padded.flatten(0, 1)


def _part(role: Role, down: bool, share: Share) -> tuple[int, int]:
    """Returns the dimension of the intermediate channels and the size of a rank's part."""
    dim, unit = (1, MXFP4.tensor(role).block[1]) if down else (0, 1)
    return dim, local_intermediate(share.intermediate, share.ranks) // unit


class Projection(NamedTuple):
    """The rank's part of a projection."""

    name: str  # for messages
    codes: torch.Tensor
    exponents: torch.Tensor
    most: int  # by how much they differ at most


@dataclass
class ShardBatch:
    """Projections of one shard of a layer that are packed at once.

    Args:
        parameters: those of w13 or w2. They grow to have room for the projections' steps.
        shard_id: "w1" (gate), "w2" (down) or "w3" (up).
        running: whether CUDA graphs may have the addresses of the parameters, so they cannot grow.
        balanced: whether ranks exchange experts.
    """

    parameters: tuple[torch.Tensor, torch.Tensor]
    shard_id: str
    share: Share
    running: bool
    balanced: bool
    projections: dict[int, Projection] = field(default_factory=dict)  # by the slots of the parameters' experts

    def add(self, name: str, slots: Iterable[int], both: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add a projection, in place of an earlier one of the same slots.

        Args:
            name: for messages.
            slots: those of the parameters' experts that hold it.
            both: the rank's part of its codes, on the parameters' device, which are kept, and exponents, on any device.
        Raises:
            CheckpointError: an exponent is NaN or too large.
        """
        codes, exponents = both
        most = check_exponents(name, exponents)
        projection = Projection(name, codes, to_device(exponents, codes.device, copy=True), most)
        for slot in slots:
            self.projections[slot] = projection

    @property
    def down(self) -> bool:
        return self.shard_id == "w2"

    @property
    def per_parameter(self) -> int:
        """How many projections of an expert share the parameters: w13 has gate and up."""
        return 1 if self.down else 2

    @property
    def size(self) -> int:
        """Bytes of the codes of a projection."""
        shape = self.parameters[0].shape
        return math.prod(shape[1:]) * CODE_BYTES // (CHUNK_BYTES * self.per_parameter)

    @property
    def waits(self) -> bool:
        """Whether others may be packed with these. A projection that may be refused is not kept waiting."""
        refusable = (self.running or self.balanced) and any(each.most > SPAN for each in self.projections.values())
        return not refusable and len(self.projections) < min(len(self.parameters[0]), BATCH_BYTES // self.size)

    def write(self) -> None:
        """Pack the projections, which do not wait any more, also if one is refused: others may not be written then.

        Raises:
            CheckpointError: a running layer has no room for the steps of one.
            UnsupportedError: one has further steps, and ranks exchange experts.
        """
        slots = sorted(self.projections)
        found = [self.projections.pop(slot) for slot in slots]
        names, most = [each.name for each in found], [each.most for each in found]
        codes = _joined(Role.WEIGHT, [each.codes for each in found], self.down, self.share)
        exponents = _joined(Role.SCALES, [each.exponents for each in found], self.down, self.share)
        del found  # frees the memory
        self._write(names, slots, codes, exponents, most)

    def _write(
        self, names: list[str], slots: list[int], codes: torch.Tensor, exponents: torch.Tensor, most: list[int]
    ) -> None:
        """Pack projections that are joined in the order of their slots. With further steps, each is packed alone."""
        blocks = Fp4Blocks.of(codes, exponents, max(most))
        if blocks.span > SPAN and len(slots) > 1:
            parts = (tensor.chunk(len(slots)) for tensor in (codes, exponents))
            for name, slot, own_codes, own_exponents, own_most in zip(names, slots, *parts, most, strict=True):
                self._write([name], [slot], own_codes, own_exponents, [own_most])
            return
        steps = steps_of(blocks)
        self._make_room(names[0], steps.extra)
        rows = len(steps.codes) // len(slots)
        for first, end in _runs(slots, max(1, RUN_BYTES // self.size)):
            weight, scales = (parameter.data[slots[first] : slots[end - 1] + 1] for parameter in self.parameters)
            own = Steps(*(tensor[first * rows : end * rows] for tensor in steps))
            write(weight, scales, self.shard_id, own)

    def _make_room(self, name: str, extra: int) -> None:
        """Make room for the further steps of a projection."""
        further, room = extra * self.per_parameter, further_steps(*self.parameters)
        if further and self.balanced:
            raise UnsupportedError(
                f"{name}: the exponents of a block differ by more than expert load balancing can serve. Restart "
                "without --enable-eplb, or with FP8MOE_FP4_EXPERTS=fp8."
            )
        if self.running:
            check_room(name, further, room)
        if further > room:
            grow(name, *self.parameters, not self.down, further)


def _runs(slots: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yields where in ascending numbers runs of up to `most` consecutive ones begin and end."""
    first = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or end - first == most:
            yield first, end
            first = end


def pack_later(
    halves: Halves,
    layer: str,
    name: str,
    slots: Iterable[int],
    both: tuple[torch.Tensor, torch.Tensor],
    batch: ShardBatch,
) -> None:
    """Pack a rank's part of a projection with others of its shard, at the latest in `Halves.write`.

    Args:
        layer: its name.
        both: codes and exponents; see `ShardBatch.add`.
        batch: an empty one, for a projection that others do not wait for.
    Raises:
        CheckpointError, UnsupportedError: the projection is refused; see `ShardBatch`.
    """
    shard = f"{layer} ({batch.shard_id})"
    waiting = halves.batches.get(shard)
    if not isinstance(waiting, ShardBatch) or waiting.parameters[0] is not batch.parameters[0]:
        waiting = batch  # others were loaded into parameters that the layer has no more
    waiting.add(name, slots, both)
    if waiting.waits:
        halves.keep(shard, waiting)
    else:
        halves.batches.pop(shard, None)
        waiting.write()


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
    """Pack a rank's part of a projection now; see `ShardBatch`."""
    batch = ShardBatch(parameters, shard_id, share, running, balanced)
    batch.add(name, slots, both)
    batch.write()


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
    """Give the parameters of w13 or w2 room for this number of further steps.

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
