"""Experts that SGLang's load balancing (EPLB) places: copies of some, and slots whose experts are exchanged later."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe_layer
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert

from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.sglang import compat, moe, online
from tests import helpers as h
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, make_checkpoint, make_unquantized
from tests.layers.packed import assert_holds
from tests.layers.sglang import layers
from tests.layers.sglang.layers import PARAMETERS, Layer, called, in_mxfp4

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]

SLOTS = (0, 1, 2, 0)  # the expert in each: the first has a copy


class Placed(Layer):
    """A rank that holds all slots."""

    uses_expert_location = True
    num_local_experts = _num_local_routed = _num_global_routed = num_experts = len(SLOTS)


@pytest.fixture(autouse=True)
def placement(monkeypatch: pytest.MonkeyPatch) -> None:
    def slots_of(layer: int, expert: int, every_rank: bool = False) -> list[int]:
        return [slot for slot, held in enumerate(SLOTS) if held == expert]

    metadata = SimpleNamespace(num_logical_experts=EXPERTS, logical_to_all_physical=slots_of)
    for module in (fused_moe_layer, compat):
        monkeypatch.setattr(module, "get_global_expert_location_metadata", lambda: metadata)


@pytest.fixture(params=["block FP8", "unquantized", "packed MXFP4"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Placed:
    if request.param == "packed MXFP4":
        monkeypatch.setattr(moe, "get_server_args", lambda: SimpleNamespace(enable_eplb=True))
        monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(PACKED_MXFP4, recoded_from=MXFP4))
        layer = Placed(256, 1, 0, len(SLOTS)).load(in_mxfp4(256))
        assert_holds(layer, in_mxfp4(256), SLOTS)
    elif request.param == "block FP8":
        layer = Placed(256, 1, 0, len(SLOTS)).load(make_checkpoint(256))
    else:
        layer = Placed(256, 1, 0, len(SLOTS))
        for name, tensors in make_unquantized(256).items():
            shard = name.partition("_")[0]
            param = layer.w2_weight if shard == "w2" else layer.w13_weight
            load = online.experts_loader("L", lambda layer, param, *rest: param.weight_loader(param, *rest))
            for expert, tensor in enumerate(tensors):
                load(layer, param, tensor, "L.weight", shard, expert)
    layer.finish()
    return layer


def test_every_copy_of_an_expert_is_loaded(layer):
    packed = layers.QUANT.spec.recoded_from is MXFP4
    whole = Layer(256, 1, 0).load(in_mxfp4(256) if packed else make_checkpoint(256))
    for name in PARAMETERS:
        for slot, expert in enumerate(SLOTS):
            assert torch.equal(getattr(layer, name)[slot].float(), getattr(whole, name)[expert].float())


def test_slots_that_are_exchanged_compute_the_same(layer):
    """SGLang moves what it finds: every parameter with one expert per index of its first dimension, and no more."""
    moved = [
        param.data
        for name, param in layer.named_parameters()
        if filter_moe_weight_param_global_expert(name, param, layer.num_local_experts)
    ]
    assert {tensor.data_ptr() for tensor in moved} == {getattr(layer, name).data_ptr() for name in PARAMETERS}
    gen = h.seeded(4, torch.device("cpu"))
    x, (weights, slots) = h.random_tokens(gen, 6, HIDDEN), h.random_routing(gen, "distinct", 6, TOPK, len(SLOTS))
    before = called(layer, x, weights, slots)
    for tensor in moved:
        tensor.copy_(tensor[[2, 1, 0, 3]])
    exchanged = torch.tensor([2, 1, 0, 3], dtype=torch.int32)[slots.long()]
    assert h.same_bits(called(layer, x, weights, exchanged), before)
