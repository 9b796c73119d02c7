"""The kernel that packs experts in MXFP4 writes the bytes of the packing in plain torch."""

import functools

import pytest
import torch

from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.pack import Share, pack, part_of_rank
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.pack_mxfp4 import PARTS
from tests import helpers as h
from tests.emulator.device import Device
from tests.mxfp4 import CLOSE_EXPONENTS, PACKED_SIZES, garbage, pack_close, random_projections

CPU = torch.device("cpu")
seeds = pytest.mark.parametrize("seed", [1, 2])


def assert_packed(
    emulator: Device, seed: int, given: tuple[torch.Tensor, torch.Tensor], to: list[torch.Tensor], shard_id: str
) -> None:
    wanted = [tensor.clone() for tensor in to]
    pack_close(*wanted, shard_id, *given)
    emulator.execute(seed, lambda: pack_close(*to, shard_id, *given))
    assert all(h.same_bits(tensor, its) for tensor, its in zip(to, wanted, strict=True))


@seeds
@pytest.mark.parametrize("shard_id", PARTS)
@pytest.mark.parametrize(("sizes", "blocks"), PACKED_SIZES)
def test_projections_of_any_size_have_the_same_bytes(
    emulator: Device, sizes: tuple[int, int], blocks: tuple[int, int], shard_id: str, seed: int
) -> None:
    given = random_projections(h.seeded(seed, CPU), 2, *sizes, "random")
    assert_packed(emulator, seed, given, garbage(2, shard_id, blocks, further=0), shard_id)


@seeds
@pytest.mark.parametrize("shard_id", PARTS)
@pytest.mark.parametrize("exponents", CLOSE_EXPONENTS)
def test_any_close_exponents_have_the_same_bytes(emulator: Device, exponents: str, shard_id: str, seed: int) -> None:
    given = random_projections(h.seeded(seed, CPU), 1, 250, 352, exponents)
    assert int(given[1].max()) - int(given[1].min()) <= SPAN
    assert_packed(emulator, seed, given, garbage(1, shard_id, (2, 3), further=0), shard_id)


@pytest.mark.parametrize("exponent", [0, 3, 250])
def test_each_byte_of_codes_is_packed_alike(emulator: Device, exponent: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(256, 64)
    codes[1::2] = codes[1::2].flip(-1)
    exponents = exponent + (torch.arange(1024) % 5).to(torch.uint8).view(256, 4)
    for shard_id in PARTS:
        assert_packed(emulator, 1, (codes, exponents), garbage(1, shard_id, (2, 1), further=0), shard_id)


@pytest.mark.parametrize("shard_id", PARTS)
def test_further_steps_of_others_become_zeros(emulator: Device, shard_id: str) -> None:
    """Of w13, those of the other half stay valid."""
    given = random_projections(h.seeded(0, CPU), 3, 200, 256, "random")
    assert_packed(emulator, 1, given, garbage(3, shard_id, (2, 2), further=3), shard_id)


def test_gate_and_up_keep_each_other(emulator: Device) -> None:
    to = garbage(2, "w1", (2, 2), further=1)
    for seed, shard_id in enumerate(("w3", "w1", "w3")):
        given = random_projections(h.seeded(seed, CPU), 2, 256, 256, "random")
        assert_packed(emulator, seed, given, to, shard_id)
    assert not to[1].isnan().any()


def test_codes_anywhere_in_memory_are_packed(emulator: Device) -> None:
    """Views of a tensor of several ranks, and those that begin between multiples of 16 bytes."""
    codes, exponents = random_projections(h.seeded(0, CPU), 1, 256, 512, "random")
    columns = codes[:, 128:], exponents.view(torch.float8_e8m0fnu)[:, 8:]
    shifted = torch.empty(codes.numel() + 1, dtype=torch.uint8)[1:].view(codes.shape).copy_(codes)
    for given, k_blocks in ((columns, 2), ((shifted, exponents), 4)):
        assert_packed(emulator, 1, given, garbage(1, "w2", (2, k_blocks), further=0), "w2")


@pytest.mark.parametrize("rank", range(4))
def test_ranks_pack_their_shares(emulator: Device, rank: int) -> None:
    """320 channels on four ranks: one has half a block, and the last has none."""
    share = Share(320, 4, rank)
    for shard_id in PARTS:
        down, to, wanted = shard_id == "w2", *(garbage(2, shard_id, (1, 1), further=0) for _ in range(2))
        sizes = (100, 320) if down else (320, 96)
        whole = zip(Role, random_projections(h.seeded(rank, CPU), 1, *sizes, "random"), strict=True)
        both = tuple(part_of_rank(role, half, down, share) for role, half in whole)
        packing = functools.partial(pack, slots=[1], shard_id=shard_id, both=both, running=False, balanced=False)
        packing("w", tuple(wanted))
        emulator.execute(rank, functools.partial(packing, "w", tuple(to)))
        assert all(h.same_bits(tensor, its) for tensor, its in zip(to, wanted, strict=True))
