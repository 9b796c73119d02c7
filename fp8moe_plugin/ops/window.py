"""The window of a rank: memory of an expert-parallel group that all of its ranks can write to."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.ops.checks import check_tensor
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.plan.sm90.catalog import MAX_RANKS
from fp8moe_plugin.plan.sm90.push import FEW_BLOCKS, FIELDS, HEADER_BYTES, WindowLayout, push_refusal, window_layout


@dataclass(frozen=True, eq=False)
class Window:
    """A rank's window, whose header `open_window` has written.

    Layers of one group share it, if their calls follow each other in a stream and every rank makes all of them.
    """

    memory: torch.Tensor  # uint8 [layout.nbytes]
    lost: torch.Tensor  # int32 [1] of the host: 1 + the rank that did not answer in time, 0: none
    ranks: int
    rows: int  # most tokens of a rank in a step
    hidden: int
    topk: int
    experts: int  # of all ranks

    @functools.cached_property
    def layout(self) -> WindowLayout:
        return window_layout(self.ranks, self.rows, self.hidden, self.topk, self.experts)


def open_window(
    memory: torch.Tensor,
    addresses: Sequence[int],
    rank: int,
    rows: int,
    hidden: int,
    topk: int,
    experts: int,
    lost: torch.Tensor,
    patience: int,
) -> Window:
    """Returns this rank's window after writing its header. Ranks call each other only after all have opened theirs.

    Args:
        memory: uint8, `window_layout(..).nbytes` bytes.
        addresses: of the memory of each rank's window, as this rank sees it.
        rows: most tokens of a rank in a step; the same on all ranks, as hidden, topk and experts.
        lost: int32 `[1]`, zero, which the GPU can write to: pinned memory of the host.
        patience: clock cycles that a kernel waits for another rank before it ends all work on the GPU with an error.
    Raises:
        InvalidInputError: the kernels do not serve such a group, a size or the rank is out of range, or the memory is
            too small, of another dtype or not at this rank's address.
    """
    ranks = len(addresses)
    for name, value in {"rows": rows, "hidden": hidden, "topk": topk, "experts": experts}.items():
        check_int(name, value, 1)
    check_int("rank", rank)
    if refusal := push_refusal(ranks, hidden):
        raise InvalidInputError(f"There is {refusal}. Use the engine's own all-to-all.")
    check_tensor("memory", memory, dtype=torch.uint8, shape=(None,))
    check_tensor("lost", lost, dtype=torch.int32, shape=(1,))
    if hidden % GROUP:
        raise InvalidInputError(f"hidden is {hidden}, needs a multiple of {GROUP}.")
    if not 0 <= rank < ranks:
        raise InvalidInputError(f"rank is {rank}, needs one of the {ranks} ranks that have an address, from 0 on.")
    if addresses[rank] != memory.data_ptr():
        raise InvalidInputError(f"addresses[{rank}] is not that of the memory. Pass each rank its own memory.")
    layout = window_layout(ranks, rows, hidden, topk, experts)
    if memory.numel() < layout.nbytes:
        raise InvalidInputError(f"The window has {memory.numel()} bytes, needs {layout.nbytes}.")
    parts = layout.tokens, layout.scales, layout.ids, layout.weights, layout.sums
    windows = (*addresses, *(0,) * (MAX_RANKS - ranks))
    fields = FIELDS.pack(*windows, *parts, patience, lost.data_ptr(), rank, ranks, FEW_BLOCKS, 0, 0)
    header = bytearray(fields.ljust(HEADER_BYTES, b"\0"))
    memory[:HEADER_BYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))
    return Window(memory, lost, ranks, rows, hidden, topk, experts)
