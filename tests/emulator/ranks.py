"""Ranks of an expert-parallel group as devices of the emulator, which store into each other's windows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp8moe_plugin.ops.push import push_moe
from fp8moe_plugin.ops.window import Window, open_window
from fp8moe_plugin.plan.sm90.push import FEW_BLOCKS, HEADER_BYTES, window_layout
from tests import helpers as h
from tests.emulator.device import Device

PATIENCE = 10**9  # steps of the emulator
FIRST_COUNT = -3 * 2**16  # of blocks, three pushes before the counts of a window overflow
TOPK, HIDDEN, INTERMEDIATE, EXPERTS_PER_RANK = 2, 256, 128, 2
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of a call: tokens, router weights, ids


@dataclass(frozen=True)
class Rank:
    device: Device
    window: Window
    layer: h.Layer  # this rank's experts
    expert_map: torch.Tensor


@dataclass(frozen=True)
class Group:
    ranks: list[Rank]
    owners: torch.Tensor

    def push(self, rank: int, rows: int, inputs: Inputs, **form: Any) -> torch.Tensor:
        me, (x, *routing) = self.ranks[rank], inputs
        return push_moe(me.window, self.owners, rows, x, *me.layer, *routing, me.expert_map, **form)

    def run(self, seed: int, ops: Callable[[int], None]) -> None:
        """Queue what `ops` does for each rank, and run all ranks beside each other."""
        for number, rank in enumerate(self.ranks):
            with rank.device.serves_ops():
                ops(number)
        self.ranks[0].device.run(seed)


def open_group(
    first: Device, layer: h.Layer, ranks: int, rows: int, patience: int = PATIENCE, few_blocks: int = FEW_BLOCKS
) -> Group:
    """Returns a group to which the experts are dealt out in turn.

    Args:
        first: device of rank 0; the others are like it.
        rows: most tokens of a rank in a step.
    """
    experts = ranks * EXPERTS_PER_RANK
    nbytes = window_layout(ranks, rows, HIDDEN, TOPK, experts).nbytes
    memories = [torch.full((nbytes,), 0xFF, dtype=torch.uint8) for _ in range(ranks)]  # NaN
    addresses = [memory.data_ptr() for memory in memories]
    owners, dealt = h.deal_experts(layer, ranks)
    members = []
    for rank, memory in enumerate(memories):
        lost = torch.zeros(1, dtype=torch.int32)
        window = open_window(memory, addresses, rank, rows, HIDDEN, TOPK, experts, lost, patience)
        words = memory[:HEADER_BYTES].view(torch.int32)
        words[32], words[33], words[64::32] = few_blocks, FIRST_COUNT, FIRST_COUNT  # also `pushes` and `arrived`
        members.append(Rank(first.beside(rank), window, *dealt[rank]))
    return Group(members, owners)


def run_calls(
    first: Device, seed: int, calls: list[list[int]], inputs: int | None = None, few_blocks: int = FEW_BLOCKS
) -> float:
    """Returns the largest relative L2 error of a rank's result in calls behind each other.

    Args:
        calls: for each the number of tokens of each rank. A rank with as many as in the call before takes its result.
        inputs: seed of tokens, weights and ids; None: `seed`.
        few_blocks: of the windows.
    """
    gen, ranks = h.seeded(seed if inputs is None else inputs, torch.device("cpu")), len(calls[0])
    experts = EXPERTS_PER_RANK * ranks
    layer = h.random_layer(gen, experts, HIDDEN, INTERMEDIATE)
    group = open_group(first, layer, ranks, max(map(max, calls)), few_blocks=few_blocks)

    def draw(tokens: int) -> Inputs:
        return h.random_tokens(gen, tokens, HIDDEN), *h.random_routing(gen, "some_missing", tokens, TOPK, experts)

    given = [[draw(tokens) for tokens in call] for call in calls]
    outs: list[tuple[Inputs, torch.Tensor]] = []

    def ops(rank: int) -> None:
        before = torch.empty(0)
        for call, of_ranks in zip(calls, given, strict=True):
            x, *routing = of_ranks[rank]
            inputs = (before if before.shape == x.shape else x), *routing
            before = group.push(rank, max(call), inputs)
            outs.append((inputs, before))

    group.run(seed, ops)
    errors = [h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True)) for (x, *routing), out in outs]
    return float(torch.tensor(errors).max())  # NaN if one is
