"""Projections in MXFP4 that are packed several at once hold the bits of those that are packed one by one."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers import pack as module
from fp8moe_plugin.layers.pack import ShardBatch, Share, pack, pack_later, part_of_rank
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.recode import BATCHES, Halves
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.mxfp4 import further_steps
from tests import helpers as h
from tests.layers.operations import counted, held

EXPERTS, HIDDEN, INTERMEDIATE = 5, 256, 320
SHARES = [Share(INTERMEDIATE, 1, 0), Share(INTERMEDIATE, 2, 0), Share(INTERMEDIATE, 2, 1), Share(INTERMEDIATE, 4, 3)]
SHARDS = "w1", "w2", "w3"
CPU, META = torch.device("cpu"), torch.device("meta")


class Given(NamedTuple):
    shard: str
    expert: int
    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def name(self) -> str:
        return f"L ({self.shard} of expert {self.expert})"

    def both(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        halves = zip(Role, self[2:], strict=True)
        codes, exponents = (part_of_rank(role, half, self.shard == "w2", share) for role, half in halves)
        return codes, exponents


def checkpoint(spans: Iterable[int] = (0,), seed: int = 0) -> list[Given]:
    """Returns all projections; `spans`: by how much a block of each differs more than the others, in turn."""
    gen, found, spans = torch.Generator().manual_seed(seed), [], list(spans)
    for expert in range(EXPERTS):
        for shard in SHARDS:
            n, k = (HIDDEN, INTERMEDIATE) if shard == "w2" else (INTERMEDIATE, HIDDEN)
            codes = torch.randint(256, (n, k // 2), generator=gen, dtype=torch.uint8)
            exponents = torch.randint(113, 121, (n, k // 32), generator=gen, dtype=torch.uint8)
            exponents[3::40, 1] -= spans[len(found) % len(spans)]
            found.append(Given(shard, expert, codes, exponents))
    return found


@dataclass
class Layer:
    share: Share = SHARES[0]
    device: torch.device = CPU
    running: bool = False
    balanced: bool = False
    name: str = "L"
    halves: Halves = field(default_factory=Halves)

    def __post_init__(self) -> None:
        rows = (self.share.intermediate // self.share.ranks + 127) // 128 * 128
        with self.device:
            tensors = expert_tensors(PACKED_MXFP4, EXPERTS, HIDDEN, rows, "scale")
        self.own = {name: torch.nn.Parameter(tensor.zero_(), requires_grad=False) for name, tensor in tensors.items()}

    def parameters(self, shard: str) -> tuple[torch.Tensor, torch.Tensor]:
        part = "w2" if shard == "w2" else "w13"
        return self.own[f"{part}_weight"], self.own[f"{part}_scale"]

    def at_once(self, projections: Iterable[Given]) -> "Layer":
        """As engines do: tensors are overwritten after the call, but codes are copies."""
        for each in projections:
            codes, exponents = (half.clone() for half in each.both(self.share))
            batch = ShardBatch(self.parameters(each.shard), each.shard, self.share, self.running, self.balanced)
            both = codes.to(self.device), exponents
            pack_later(self.halves, self.name, each.name, [each.expert], both, batch)
            exponents.fill_(7)
        return self

    def one_by_one(self, projections: Iterable[Given]) -> "Layer":
        states = {"running": self.running, "balanced": self.balanced}
        for each in projections:
            both = each.both(self.share)
            pack(each.name, self.parameters(each.shard), [each.expert], each.shard, both, self.share, **states)
        return self

    def holds(self, other: "Layer") -> bool:
        return all(h.same_bits(self.own[name].data, tensor.data) for name, tensor in other.own.items())


def at_most(monkeypatch: pytest.MonkeyPatch, projections: int, share: Share = SHARES[0]) -> None:
    """Limits a batch to so many projections, and writes two of them at once.

    w2 has as many codes as w1 here, but for its padding.
    """
    rows = (share.intermediate // share.ranks + 127) // 128 * 128
    monkeypatch.setattr(module, "BATCH_BYTES", projections * rows * HIDDEN // 2)
    monkeypatch.setattr(module, "RUN_BYTES", 2 * rows * HIDDEN // 2)


ORDERS = {
    "expert by expert": lambda each: (each.expert, each.shard),
    "shard by shard": lambda each: (each.shard, each.expert),
    "backwards": lambda each: (-each.expert, each.shard),
    "between its ends": lambda each: ((0, 2, 1, 3, 4).index(each.expert), each.shard),
    "shuffled": lambda each: random.Random(each.name).random(),
}


@pytest.mark.parametrize("spans", [(0,), (SPAN, 0, 0, 0), (30, 0), (0, 0, 30, 0, 60, 0, 0)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("share", SHARES)
def test_a_batch_writes_the_same_bits(monkeypatch, share, order, spans):
    given = sorted(checkpoint(spans), key=ORDERS[order])
    wanted = Layer(share).one_by_one(given)
    for projections in (1, 2, 3, 100):
        at_most(monkeypatch, projections, share)
        layer = Layer(share).at_once(given)
        layer.halves.write()
        assert layer.holds(wanted)


def test_the_hidden_size_may_end_within_a_block(monkeypatch):
    monkeypatch.setitem(globals(), "HIDDEN", 288)
    layer, wanted = Layer().at_once(checkpoint()), Layer().one_by_one(checkpoint())
    assert layer.holds(wanted)


def test_a_batch_of_all_experts_does_not_wait():
    layer = Layer().at_once(checkpoint())
    assert not layer.halves.batches
    assert layer.holds(Layer().one_by_one(checkpoint()))


def test_projections_wait_until_the_layer_ends():
    given = checkpoint()[:-3]
    layer = Layer(name="L1").at_once(given)
    layer.halves.write("L ")
    layer.halves.write("L11 ")
    assert layer.holds(Layer())
    layer.halves.check("L1 ")
    assert layer.holds(Layer().one_by_one(given))
    assert not layer.halves.batches


@pytest.mark.parametrize("layer", ["", "L "])
def test_a_load_that_fails_leaves_nothing_to_the_next_one(layer):
    own = Layer().at_once(checkpoint(seed=1)[:7])
    own.halves.clear(layer)
    own.at_once(checkpoint()[3:])
    own.halves.write()
    assert own.holds(Layer().one_by_one(checkpoint()[3:]))


def test_projections_of_replaced_parameters_are_forgotten():
    before = Layer().at_once(checkpoint(seed=1)[:7])
    after = Layer(halves=before.halves).at_once(checkpoint()[:-3])
    after.halves.write()
    assert before.holds(Layer())
    assert after.holds(Layer().one_by_one(checkpoint()[:-3]))


def test_the_last_of_the_same_projection_counts():
    given = [*checkpoint(seed=1)[:9], *checkpoint()[:-3]]
    layer = Layer().at_once(given)
    layer.halves.write()
    assert layer.holds(Layer().one_by_one(given))


def test_an_expert_may_have_several_slots():
    layer, wanted = Layer(), Layer()
    for each in checkpoint()[:3]:
        both, parameters = each.both(layer.share), layer.parameters(each.shard)
        batch = ShardBatch(parameters, each.shard, layer.share, False, False)
        pack_later(layer.halves, "L", each.name, [3, 0], both, batch)
        wanted.one_by_one([each._replace(expert=slot) for slot in (3, 0)])
    layer.halves.write()
    assert layer.holds(wanted)


def test_as_many_shards_wait_as_a_layer_has():
    """A checkpoint may have one expert of all layers before the next one."""
    halves, given = Halves(), checkpoint()
    layers = [Layer(name=f"L{number}", halves=halves) for number in range(4)]
    for expert in range(EXPERTS - 1):
        for layer in layers:
            layer.at_once(given[3 * expert : 3 * expert + 3])
            assert len(halves.batches) == BATCHES
    halves.write()
    assert all(layer.holds(Layer().one_by_one(given[:-3])) for layer in layers)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [("running", CheckpointError, "need . further steps"), ("balanced", UnsupportedError, "--enable-eplb")],
)
@pytest.mark.parametrize("number", range(3))
def test_what_is_refused_is_refused_where_it_arrives(number, state, error, message):
    given, wide = checkpoint(), checkpoint((30,))
    layer = Layer(**{state: True}).at_once(given[: 3 + number])
    with pytest.raises(error, match=rf"L \({SHARDS[number]} of expert 1\): .*{message}"):
        layer.at_once(wide[3 + number : 4 + number])


def test_a_running_layer_takes_what_fits():
    wide = checkpoint((30, 0))
    layer, wanted = (Layer().one_by_one(wide) for _ in range(2))
    layer.running = True
    layer.at_once(checkpoint()).at_once(wide[:7])
    layer.halves.write()
    assert further_steps(*layer.parameters("w2")) == 1
    assert layer.holds(wanted.one_by_one(checkpoint()).one_by_one(wide[:7]))


def test_exponents_that_are_nan_are_refused_where_they_arrive():
    given = checkpoint()
    given[4].exponents[5, 5] = 0xFF
    layer = Layer().at_once(given[:4])
    with pytest.raises(CheckpointError, match=r"the scales of L \(w2 of expert 1\)"):
        layer.at_once(given[4:5])
    layer.halves.write()
    assert layer.holds(Layer().one_by_one(given[:4]))


@pytest.mark.parametrize("order", ["expert by expert", "backwards"])
def test_a_batch_takes_few_launches(order):
    """However many projections it has; each of these has two copies. The meta device has no values to wait for."""
    given = sorted(checkpoint(), key=ORDERS[order])
    Layer(device=META).at_once(given)  # makes the tables
    layer = Layer(device=META)
    with counted("meta") as operations:
        layer.at_once(given)
    stacked, padded = 2, 2
    assert operations.launches == 2 * len(given) + (10 + stacked + padded) * len(SHARDS)


def test_experts_that_are_apart_are_written_apart():
    """They take five launches for each run of consecutive ones; what comes before is shared."""
    given = [each for each in checkpoint() if each.shard == "w1" and each.expert != 2]
    Layer(device=META).at_once(given).halves.write()  # makes the tables
    layer = Layer(device=META)
    with counted("meta") as operations:
        layer.at_once(given).halves.write()
    stacked, padded = 2, 2
    assert operations.launches == 2 * len(given) + 10 + stacked + padded + 5


def test_batches_take_little_memory():
    """Of DeepSeek-V4-Flash without tensor parallelism: a layer of its experts has 3,264 MiB."""
    hidden, intermediate, experts = 4096, 2048, 24
    share, halves = Share(intermediate, 1, 0), Halves()
    with META:
        own = expert_tensors(PACKED_MXFP4, experts, hidden, intermediate, "scale")
    exponents = torch.full((intermediate, hidden // 32), 120, dtype=torch.uint8)
    with held("meta") as memory:
        for expert in sorted(range(experts), key=str):  # as in a file, so batches are scattered
            for shard in SHARDS:
                part, n, k = ("w2", hidden, intermediate) if shard == "w2" else ("w13", intermediate, hidden)
                batch = ShardBatch((own[f"{part}_weight"], own[f"{part}_scale"]), shard, share, False, False)
                both = torch.empty(n, k // 2, dtype=torch.uint8, device=META), exponents.view(n, k // 32)
                pack_later(halves, "L", f"{shard} of expert {expert}", [expert], both, batch)
        halves.write()
    assert memory.peak < 155 << 20
