"""Packed experts in MXFP4, for any engine: what parameters hold, what is refused, and the memory that it takes."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers import pack
from fp8moe_plugin.layers.pack import Share, part_of_rank
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.recode import Halves
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.ops.mxfp4 import dequantize, further_steps, widened
from fp8moe_plugin.plan.sm90.catalog import pack_mxfp4_key
from tests import helpers as h
from tests.layers.operations import counted, held
from tests.layers.test_recode import dequantized

EXPERTS, FURTHER = 3, 4
HIDDEN, INTERMEDIATE = 288, 320  # both end within a block
SHARES = [Share(INTERMEDIATE, 1, 0), Share(INTERMEDIATE, 2, 0), Share(INTERMEDIATE, 2, 1), Share(INTERMEDIATE, 4, 3)]
SHARDS = "w1", "w2", "w3"
META = torch.device("meta")


class Given(NamedTuple):
    """A projection of the checkpoint."""

    shard: str
    codes: torch.Tensor
    exponents: torch.Tensor

    def pack(self, layer: "Layer", *slots: int) -> None:
        halves = zip(Role, (self.codes, self.exponents), strict=True)
        both = tuple(part_of_rank(role, half, self.shard == "w2", layer.share) for role, half in halves)
        states = {"running": layer.running, "balanced": layer.balanced}
        pack.pack(f"L ({self.shard})", layer.parameters(self.shard), slots, self.shard, both, **states)


def given(shard: str, seed: int = 0, span: int = 7) -> Given:
    gen = torch.Generator().manual_seed(seed)
    n, k = (HIDDEN, INTERMEDIATE) if shard == "w2" else (INTERMEDIATE, HIDDEN)
    codes = torch.randint(256, (n, k // 2), generator=gen, dtype=torch.uint8)
    exponents = torch.randint(120 - min(span, 7), 121, (n, k // 32), generator=gen, dtype=torch.uint8)
    exponents[3::40, 1] = 120 - span
    return Given(shard, codes, exponents)


@dataclass
class Layer:
    share: Share = SHARES[0]
    running: bool = False
    balanced: bool = False

    def __post_init__(self) -> None:
        rows = (self.share.intermediate // self.share.ranks + 127) // 128 * 128
        tensors = expert_tensors(PACKED_MXFP4, EXPERTS, (HIDDEN + 127) // 128 * 128, rows, "scale")
        self.own = {name: torch.nn.Parameter(tensor.zero_(), requires_grad=False) for name, tensor in tensors.items()}

    def parameters(self, shard: str) -> tuple[torch.Tensor, torch.Tensor]:
        part = "w2" if shard == "w2" else "w13"
        return self.own[f"{part}_weight"], self.own[f"{part}_scale"]

    def weight(self, shard: str, slot: int) -> torch.Tensor:
        """Returns what a slot holds, with its padding."""
        weight, scales = (parameter[slot] for parameter in self.parameters(shard))
        found = dequantize(weight, scales, shard != "w2").double()
        return found if shard == "w2" else found.chunk(2)[shard == "w3"]

    def holds(self, projection: Given, slot: int) -> bool:
        """Whether a slot holds this rank's part, and zeros around it."""
        found, down = self.weight(projection.shard, slot), projection.shard == "w2"
        part, (_, ranks, rank) = found.shape[1 if down else 0], self.share
        exact = dequantized(projection.codes, projection.exponents)
        channels, others = (exact.mT, found.shape[0]) if down else (exact, found.shape[1])
        whole = torch.zeros(ranks * part, others, dtype=torch.float64)
        whole[: channels.shape[0], : channels.shape[1]] = channels
        wanted = whole[rank * part : (rank + 1) * part]
        return torch.equal(found, wanted.mT if down else wanted)


@pytest.mark.parametrize("span", [0, SPAN, SPAN + 1, 40])
@pytest.mark.parametrize("share", SHARES)
def test_a_rank_holds_its_part(share, span):
    layer, projections = Layer(share), [given(shard, seed, span) for seed, shard in enumerate(SHARDS)]
    for projection in projections:
        projection.pack(layer, 1)
    assert all(layer.holds(projection, 1) for projection in projections)


def test_an_expert_may_have_several_slots():
    layer = Layer()
    for span in (3, 40):
        given("w1", span=span).pack(layer, 2, 0)
        assert layer.holds(given("w1", span=span), 2)
        assert layer.holds(given("w1", span=span), 0)
    assert not layer.weight("w1", 1).any()


@pytest.mark.parametrize("before", [40, 100])
@pytest.mark.parametrize("shard", SHARDS)
def test_the_next_projection_of_a_slot_replaces_it(shard, before):
    layer, other = Layer(), given("w3" if shard == "w1" else "w1", seed=9, span=30)
    given(shard, span=before).pack(layer, 1)
    other.pack(layer, 1)
    given(shard, seed=1).pack(layer, 1)
    assert layer.holds(given(shard, seed=1), 1)
    assert layer.holds(other, 1)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [("running", CheckpointError, "need . further steps"), ("balanced", UnsupportedError, "--enable-eplb")],
)
@pytest.mark.parametrize("shard", SHARDS)
def test_further_steps_may_be_refused(shard, state, error, message):
    layer = Layer(**{state: True})
    given(shard).pack(layer, 0)
    with pytest.raises(error, match=rf"L \({shard}\): .*{message}"):
        given(shard, span=30).pack(layer, 0)
    assert layer.holds(given(shard), 0)


def test_a_running_layer_takes_what_fits():
    layer = Layer()
    given("w2", span=30).pack(layer, 0)
    layer.running = True
    for span in (3, 30):
        given("w2", 1, span).pack(layer, 1)
        assert layer.holds(given("w2", 1, span), 1)
    assert further_steps(*layer.parameters("w2")) == 1


def test_exponents_that_are_nan_are_refused():
    projection = given("w2")
    projection.exponents[5, 5] = 0xFF
    with pytest.raises(CheckpointError, match=r"the scales of L \(w2\)"):
        projection.pack(Layer(), 0)


# ---- launches and memory ---------------------------------------------------------------------------------------------


def load_flash(experts: int) -> None:
    """Load experts of DeepSeek-V4-Flash, without tensor parallelism, on the meta device."""
    hidden, intermediate, halves = 4096, 2048, Halves()
    with META:
        own = expert_tensors(PACKED_MXFP4, experts, hidden, intermediate, "scale")
    for expert in range(experts):
        for shard in SHARDS:
            part, n, k = ("w2", hidden, intermediate) if shard == "w2" else ("w13", intermediate, hidden)
            name = f"{shard} of expert {expert}"
            exponents = torch.full((n, k // 32), 120, dtype=torch.uint8)
            assert halves.add(name, Role.WEIGHT, torch.empty(n, k // 2, dtype=torch.uint8), META) is None
            both = halves.add(name, Role.SCALES, exponents, META)
            parameters = own[f"{part}_weight"], own[f"{part}_scale"]
            pack.pack(name, parameters, [expert], shard, both, running=False, balanced=False)
            del both


def test_a_projection_takes_a_launch_and_two_copies(device_of_kernels):
    with counted("meta") as operations:
        load_flash(2)
    assert len(device_of_kernels.launches) == 2 * len(SHARDS)
    assert operations.launches == 2 * 2 * len(SHARDS)


@pytest.mark.usefixtures("device_of_kernels")
def test_a_projection_waits_alone():
    """Its codes and exponents are all that the device holds beside the parameters."""
    with held("meta") as memory:
        load_flash(4)
    with META:
        own = expert_tensors(PACKED_MXFP4, 4, 4096, 2048)
    codes, exponents = 2048 * 4096 // 2, 2048 * 4096 // 32
    assert memory.peak == sum(tensor.nbytes for tensor in own.values()) + codes + exponents


def test_kernels_pack_only_close_exponents(device_of_kernels):
    layer = Layer()
    given("w1", span=SPAN + 1).pack(layer, 0)
    assert layer.holds(given("w1", span=SPAN + 1), 0)
    assert not device_of_kernels.launches
    given("w1", span=SPAN).pack(layer, 2, 0)
    assert [launch.key for launch in device_of_kernels.launches] == [pack_mxfp4_key()] * 2


@pytest.fixture
def device_of_kernels(monkeypatch: pytest.MonkeyPatch) -> h.Recorder:
    recorder = h.Recorder()
    h.serve(monkeypatch, recorder)
    return recorder


# ---- growing -------------------------------------------------------------------------------------------------------


def parameters_of(name: str, device: str, experts: int, hidden: int, intermediate: int) -> list[torch.nn.Parameter]:
    """Returns the weights and the scales of w13 or w2, with random contents."""
    gen, found = torch.Generator(device).manual_seed(0), []
    for suffix in ("weight", "scale"):
        with torch.device(device):
            tensor = expert_tensors(PACKED_MXFP4, experts, hidden, intermediate, "scale")[f"{name}_{suffix}"]
        tensor.view(torch.uint8).random_(generator=gen)
        found.append(torch.nn.Parameter(tensor, requires_grad=False))
    return found


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_tensor_is_freed_before_it_grows(
    monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture, name: str
) -> None:
    """One expert after the other is copied to the place of all."""
    parameters = parameters_of(name, "cpu", EXPERTS, 384, 256)
    wanted = widened(*(parameter.data.clone() for parameter in parameters), name == "w13", FURTHER)
    freed, experts = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters], []

    def widen(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(reference.expired() for reference in freed)
        experts.append(len(arguments[0]))
        return widened(*arguments)

    monkeypatch.setattr(pack, "widened", widen)
    with plugin_log.at_level("INFO", logger="fp8moe"):
        pack.grow("L", *parameters, name == "w13", FURTHER)
    assert f"the weights of this layer take {FURTHER} steps of K more" in plugin_log.text
    assert experts == [1] * EXPERTS
    assert further_steps(*parameters) == FURTHER
    assert all(h.same_bits(parameter.data, its) for parameter, its in zip(parameters, wanted, strict=True))


@pytest.mark.gpu
def test_growing_takes_no_memory_beside_the_result() -> None:
    parameters = parameters_of("w13", "cuda", 16, 4096, 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    other = torch.cuda.memory_allocated() - sum(parameter.nbytes for parameter in parameters)
    pack.grow("L", *parameters, True, FURTHER)
    grown = sum(parameter.nbytes for parameter in parameters)
    assert torch.cuda.max_memory_allocated() - other <= grown + grown // 16
