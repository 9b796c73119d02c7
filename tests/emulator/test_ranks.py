"""Layers whose ranks store tokens and results into each other's windows, under schedules that are hard on them."""

import ctypes
from dataclasses import replace
from functools import partial

import pytest
import torch

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.plan.sm90.constants import MANY_ROWS_TILE, TAIL_ROWS
from tests import helpers as h
from tests.emulator.build import Kernels
from tests.emulator.device import Device, EmulatorError
from tests.emulator.layers import MOST_ERROR
from tests.emulator.ranks import EXPERTS_PER_RANK, HIDDEN, INTERMEDIATE, TOPK, open_group, run_calls
from tests.mxfp4 import random_experts

SMALL_BATCH_MULTIPROCESSORS = 16  # the fewest with room for its clusters


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("calls", [[[5, 3], [2, 4], [5, 5]], [[1, 0, 3, 2], [2, 2, 0, 1]]])
def test_calls_behind_each_other(emulator: Device, calls: list[list[int]], seed: int) -> None:
    assert run_calls(emulator, seed, calls) <= MOST_ERROR


@pytest.mark.parametrize("seed", [1, 2])
def test_many_rows(emulator: Device, seed: int) -> None:
    assert run_calls(emulator, seed, [[70, 40], [3, 4], [90, 100]]) <= MOST_ERROR


@pytest.mark.parametrize("seed", [1, 2])
def test_pushed_rows(emulator: Device, seed: int) -> None:
    """In turns with sums, of few rows."""
    with h.rows_pushed_from(2):
        assert run_calls(emulator, seed, [[70, 40], [3, 4], [0, 100], [90, 90]]) <= MOST_ERROR


@pytest.mark.parametrize("seed", [1, 2])
def test_more_blocks_than_count_themselves_on_all_ranks(emulator: Device, seed: int) -> None:
    """In some of the pushes."""
    assert run_calls(emulator, seed, [[5, 3], [1, 2], [7, 9]], few_blocks=4) <= MOST_ERROR


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_with_other_grids(emulator: Device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where some ranks use fewer multiprocessors of their GPUs."""

    def beside(number: int) -> Device:
        device = Device.beside(emulator, number)
        device.multiprocessors -= number
        return device

    monkeypatch.setattr(emulator, "beside", beside)
    assert run_calls(emulator, seed, [[20, 9], [1, 2], [8, 30]]) <= MOST_ERROR


@pytest.mark.parametrize("seed", [1, 2])
def test_small_batches(emulator_runtime: ctypes.CDLL, kernels: Kernels, seed: int) -> None:
    emulator = Device(emulator_runtime, kernels, SMALL_BATCH_MULTIPROCESSORS)
    assert run_calls(emulator, seed, [[2, 1], [1, 2]]) <= MOST_ERROR


@pytest.mark.parametrize("span", [0, 30])  # with further steps, or without, on one of the ranks
@pytest.mark.parametrize("tokens", [2, 70])
def test_packed_weights(emulator_runtime: ctypes.CDLL, kernels: Kernels, tokens: int, span: int) -> None:
    """Also where the ranks alone would take other kernels."""
    gen = h.seeded(0, torch.device("cpu"))
    shape = EXPERTS_PER_RANK, HIDDEN, INTERMEDIATE
    layers = [random_experts(gen, *shape, binades).packed() for binades in (0, span)]
    emulator, any_layer = (
        Device(emulator_runtime, kernels, SMALL_BATCH_MULTIPROCESSORS),
        h.random_layer(gen, 4, 256, 128),
    )
    group = open_group(emulator, any_layer, 2, tokens)
    ranks = [replace(rank, layer=layer) for rank, layer in zip(group.ranks, layers, strict=True)]
    group, outs = replace(group, ranks=ranks), {}
    x, routing = h.random_tokens(gen, tokens, HIDDEN), h.random_routing(gen, "distinct", tokens, TOPK, 4)

    def ops(rank: int) -> None:
        outs[rank] = group.push(rank, tokens, (x, *routing), weights=PACKED_MXFP4)

    group.run(1, ops)
    shares = [fused_moe(x, *rank.layer, *routing, expert_map=rank.expert_map, weights=PACKED_MXFP4) for rank in ranks]
    for out in outs.values():
        assert h.relative_l2(out, sum(share.float() for share in shares)) <= MOST_ERROR


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named(emulator: Device, absent: int) -> None:
    gen, experts = h.seeded(0, torch.device("cpu")), 2 * EXPERTS_PER_RANK
    layer = h.random_layer(gen, experts, HIDDEN, INTERMEDIATE)
    inputs = h.random_tokens(gen, 2, HIDDEN), *h.random_routing(gen, "distinct", 2, TOPK, experts)
    group = open_group(emulator, layer, 2, 2, patience=20_000)

    def ops(rank: int) -> None:
        if rank == absent:
            group.ranks[rank].window.memory.data_ptr()  # it is there, but calls nothing
        else:
            group.push(rank, 2, inputs)

    with pytest.raises(EmulatorError, match="the kernel has trapped"):
        group.run(1, ops)
    assert group.ranks[1 - absent].window.lost == 1 + absent


def test_pushed_rows_have_the_bits_of_one_rank(emulator: Device) -> None:
    """On four ranks, which push rows. One expert has a tile with a tail; the others have tiles of few rows."""
    gen, ranks, tokens = h.seeded(0, torch.device("cpu")), 4, 41
    experts, in_tile = ranks * EXPERTS_PER_RANK, MANY_ROWS_TILE + TAIL_ROWS
    layer, x = h.random_layer(gen, experts, HIDDEN, INTERMEDIATE), h.random_tokens(gen, ranks * tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "distinct", ranks * tokens, TOPK, experts)
    ids[:, 1] = 1 + ids[:, 1] % (experts - 1)
    ids[:in_tile, 0], ids[in_tile:, 0] = 0, 1 + ids[in_tile:, 1] % (experts - 1)
    group, outs = open_group(emulator, layer, ranks, tokens), {}

    def ops(rank: int) -> None:
        outs[rank] = group.push(rank, tokens, tuple(t[rank * tokens :][:tokens] for t in (x, weights, ids)))

    with h.rows_pushed_from(ranks):
        group.run(1, ops)
    alone = emulator.execute(1, partial(fused_moe, x, *layer, weights, ids))
    assert torch.cat([outs[rank] for rank in range(ranks)]).equal(alone)


def test_a_token_has_the_bits_of_one_rank_alone(emulator: Device) -> None:
    """Where one rank has all experts of a token, nothing is added to its sum."""
    gen, tokens, experts = h.seeded(0, torch.device("cpu")), 6, 2 * EXPERTS_PER_RANK
    layer, x = h.random_layer(gen, experts, HIDDEN, INTERMEDIATE), h.random_tokens(gen, tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS_PER_RANK)
    group, outs = open_group(emulator, layer, 2, tokens), {}

    def ops(rank: int) -> None:
        outs[rank] = group.push(rank, tokens, (x, weights, ids * 2 + rank))

    group.run(2, ops)
    for rank, member in enumerate(group.ranks):
        alone = emulator.execute(2, partial(fused_moe, x, *member.layer, weights, ids))
        assert outs[rank].equal(alone)
