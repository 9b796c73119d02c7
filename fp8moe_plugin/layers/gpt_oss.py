"""The tensors of gpt-oss's experts: engines pass those of all experts at once, cut for the rank in groups of a scale.

A checkpoint has the codes of a layer before their exponents. They wait in the parameter of their weight: those of an
expert, as they are, at the beginning of its part, which is larger in both forms. So neither the host nor the device
keeps a copy, and the engine may overwrite its tensor. The host only hands over the memory of an expert, in one piece if
it is one. On the device, several experts at a time are taken apart (gate and up rows alternate in w13), zero-padded to
whole scale blocks, and re-encoded or packed.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.gpt_oss import rank_channels
from fp8moe_plugin.checkpoint.shapes import local_intermediate
from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import Role, ceil_div
from fp8moe_plugin.layers.loading import checked_bias
from fp8moe_plugin.layers.pack import Share, pack
from fp8moe_plugin.layers.parameters import is_bias, stored_tensor_format
from fp8moe_plugin.layers.recode import Halves, block_fp8, check_exponents, copies_early, on_one_thread, to_device
from fp8moe_plugin.ops.fp4_blocks import CODES, EXPONENTS, SPAN, Fp4Blocks, Range
from fp8moe_plugin.ops.mxfp4 import steps_of
from fp8moe_plugin.ops.pack_mxfp4 import pack_mxfp4, write

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # by the beginning of a parameter's name; their rows alternate
BATCH_BYTES = 1 << 25  # of codes that are written at once; the device needs up to ten times as much while it does


def part_of(weight_name: str) -> str:
    """Returns the beginning of a parameter's name, "w13" or "w2", by the name that the engines' models pass."""
    return "w13" if ".w13_" in weight_name else "w2"


def share_of(intermediate: int, ranks: int, rank: int) -> tuple[int, Share]:
    """Returns the channels in a rank's tensors, and the share for loaders, which take all of them and pad.

    Args:
        intermediate: channels on all ranks.
    """
    return rank_channels(intermediate, ranks, rank), Share(local_intermediate(intermediate, ranks), 1, 0)


def check_shape(
    what: str, parameter: torch.Tensor, tensor: torch.Tensor, experts: int, hidden: int, intermediate: int
) -> None:
    """Raise `CheckpointError` unless a tensor has the shape that config.json implies.

    Args:
        what: the tensor's name.
        experts: on this rank.
        intermediate: channels in the tensors of this rank.
    """
    rows, columns = (2 * intermediate, hidden) if part_of(what) == "w13" else (hidden, intermediate)
    wanted = [rows] if is_bias(parameter) else stored_tensor_format(parameter).shape(rows, columns)
    if list(tensor.shape) != [experts, *wanted]:
        raise CheckpointError(
            f"{what} has shape {list(tensor.shape)}, but must have {[experts, *wanted]} for {experts} experts with "
            f"{intermediate} intermediate channels. Check that config.json belongs to the weights."
        )


def check_in_order(what: str, experts: int, slot: Callable[[int], int | None]) -> None:
    """Raise `CheckpointError` unless a rank holds its experts in the order of their tensors.

    Args:
        slot: returns where an expert of the tensors is.
    """
    if (slot(0), slot(experts - 1)) != (0, experts - 1):
        raise CheckpointError(
            f"{what}: this rank does not hold {experts} experts in their order, as the engine's model passes them. "
            "Remove the options that place experts in another way."
        )


def bias_on_device(what: str, parameter: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns a bias in float32 on the parameter's device, where its values are checked; `check_shape` comes before."""
    bias = to_device(bias, parameter.device)
    return checked_bias(what, parameter, bias, *bias.shape)


def copy_bias(parameter: torch.Tensor, part: str, bias: torch.Tensor) -> None:
    """Copy a bias to a parameter, zero-padded. Only the first of several ranks has one for w2; others get zeros."""
    shards = len(SHARDS[part])
    for row, own in enumerate(parameter.data.chunk(shards, 1)):
        given = bias[:, row::shards]
        own.copy_(torch.nn.functional.pad(given, (0, own.shape[1] - given.shape[1])))


class Target(NamedTuple):
    """The parameters of w13 or w2 of a rank's experts, into which their codes and exponents are loaded."""

    layer: str  # its name, for messages
    part: str  # "w13" or "w2"
    weight: torch.Tensor
    scales: torch.Tensor
    share: Share
    packed: bool  # or in block FP8
    running: bool  # see `pack`
    balanced: bool

    @on_one_thread
    def load(self, halves: Halves, role: Role, tensor: torch.Tensor) -> None:
        """Load codes or exponents. The second of both to arrive writes the parameters.

        Raises:
            CheckpointError, UnsupportedError: see `pack` and `block_fp8`.
        """
        waits = role is Role.WEIGHT
        half = tensor.view(torch.uint8)
        half = self._kept(half) if waits else half
        both = halves.add(f"{self.layer} ({self.part})", role, half, self.weight.device, stays=waits)
        if both and not self.packed:
            self._recode(*both)
        elif both and (first := self._pack(*both)) is not None:
            exponents, codes = both[1], [each.to("cpu", copy=True) for each in both[0][first:]]
            del both, half  # views of parameters that may grow
            self._pack_one_by_one(first, codes, exponents)

    def _kept(self, codes: torch.Tensor) -> torch.Tensor:
        """Copy codes to where they wait. Returns views of them."""
        parts = self.weight.data.view(torch.uint8).flatten(1)
        kept: torch.Tensor = parts[:, : codes[0].numel()].unflatten(1, codes.shape[1:])
        for own, expert in zip(kept, codes, strict=True):
            own.copy_(expert, non_blocking=copies_early(expert, own.device))
        return kept

    def _recode(self, codes: torch.Tensor, exponents: torch.Tensor) -> None:
        for batch in self._batches(codes, exponents):
            found = [block_fp8(batch.name, *both, batch.exponents.span) for both in batch.projections]
            for row, tensors in enumerate(found):
                for parameter, tensor in zip((self.weight, self.scales), tensors, strict=True):
                    own = parameter.data[batch.experts].chunk(len(found), 1)[row]
                    own.copy_(tensor.view(own.shape))

    def _pack(self, codes: torch.Tensor, exponents: torch.Tensor) -> int | None:
        """Returns the first of the experts that are left, if their blocks may take further steps."""
        for batch in self._batches(codes, exponents):
            own = self.weight.data[batch.experts], self.scales.data[batch.experts]
            if batch.exponents.span <= SPAN:
                for shard, both in zip(SHARDS[self.part], batch.projections, strict=True):
                    pack_mxfp4(*own, shard, *both, batch.exponents.highest)
                continue
            steps = [steps_of(Fp4Blocks.of(*both)) for both in batch.projections]
            if any(each.extra for each in steps):
                return int(batch.experts.start)
            for shard, each in zip(SHARDS[self.part], steps, strict=True):
                write(*own, shard, each)
        return None

    def _pack_one_by_one(self, first: int, codes: list[torch.Tensor], exponents: torch.Tensor) -> None:
        """Pack the experts from `first` on, whose codes are on the host."""
        device, shards = self.weight.device, SHARDS[self.part]
        for expert, own in enumerate(codes, first):
            on_device = own.to(device)
            for row, shard in enumerate(shards):
                name = f"{self.layer} ({shard} of local expert {expert})"
                both = on_device[row :: len(shards)], exponents[expert][row :: len(shards)]
                options = {"running": self.running, "balanced": self.balanced}
                pack(name, (self.weight, self.scales), [expert], shard, both, **options)

    def _batches(self, codes: torch.Tensor, exponents: torch.Tensor) -> Iterator["Batch"]:
        """Yields the experts; what is done with a batch may overwrite its codes."""
        shards = len(SHARDS[self.part])
        rows = codes.shape[1] if self.part == "w2" else self.share.intermediate
        columns = self.share.intermediate if self.part == "w2" else 2 * codes.shape[2]
        blocks, k_blocks = (ceil_div(size, GROUP) for size in (rows, columns))

        def padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
            """Returns a copy."""
            missing = k_blocks * width - tensor.shape[2], blocks * GROUP - tensor.shape[1]
            return torch.nn.functional.pad(tensor, (0, missing[0], 0, missing[1])).flatten(0, 1)

        count = max(1, BATCH_BYTES // max(1, codes[0].numel()))
        for first in range(0, len(codes), count):
            here = slice(first, min(first + count, len(codes)))
            name = f"{self.layer} ({self.part} of local experts {first} to {here.stop - 1})"
            found = check_exponents(name, exponents[here])
            both = codes[here], to_device(exponents[here], codes.device)
            halves = ([half[:, row::shards] for half in both] for row in range(shards))
            projections = [(padded(own, CODES), padded(its, EXPONENTS)) for own, its in halves]
            yield Batch(name, here, found, projections)


class Batch(NamedTuple):
    """Experts that are written at once."""

    name: str
    experts: slice
    exponents: Range
    projections: list[tuple[torch.Tensor, torch.Tensor]]  # codes and exponents of all of them, as one weight
