"""vLLM's expert load balancing moves the experts of a layer in place; without an engine."""

from dataclasses import replace

import pytest
import torch
from torch import distributed

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.distributed.eplb.eplb_communicator import TorchDistGlooStagedEplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

from fp8moe_plugin.ops import fused_moe
from tests import helpers as h
from tests.layers.experts import EXPERTS, HIDDEN, TOPK, make_checkpoint, make_mxfp4, make_rows
from tests.layers.vllm import one_rank
from tests.layers.vllm.one_rank import PACKED, RECODED, ROWS, Layer

INTERMEDIATE = 256
START = [0, 1, 2, 0, 1]  # the expert in each place; the last two are redundant
AFTER = [[2, 1, 1, 0, 2], [0, 0, 0, 1, 2], START]  # one move after the other


KINDS = {
    "by block": (make_checkpoint, None),
    "by row": (make_rows, replace(ROWS, input_scales=True)),
    "re-encoded MXFP4": (make_mxfp4, RECODED),
    "packed MXFP4": (make_mxfp4, PACKED),
}


@pytest.fixture(params=KINDS)
def layer(request, monkeypatch) -> Layer:
    """A layer with more places than experts, filled as in `START`."""
    make, quant = KINDS[request.param]
    monkeypatch.setattr(one_rank, "EXPERTS", len(START))
    layer = Layer(INTERMEDIATE, 1, 0, quant, enable_eplb=True)
    return layer.load({name: [tensors[e] for e in START] for name, tensors in make(INTERMEDIATE).items()})


@pytest.fixture
def alone(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_a_layer_says_the_same_wherever_its_experts_are(layer, alone):
    """The experts read only what vLLM moves, and keep no copies: results are equal bit for bit."""
    gen = h.seeded(0, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 40, HIDDEN), h.random_routing(gen, "distinct", 40, TOPK, EXPERTS)
    first = run(layer, x, weights, ids, START)
    pointers = [p.data_ptr() for p in layer.parameters()]
    views = list(layer.get_expert_weights())
    buffers = [torch.empty_like(view) for view in views]
    communicator = TorchDistGlooStagedEplbCommunicator(cpu_group=alone)
    for before, after in zip([START, *AFTER], AFTER, strict=False):
        maps = (torch.tensor([places]) for places in (before, after))
        rearrange_expert_weights_inplace(*maps, [views], buffers, alone, communicator)
        assert h.same_bits(run(layer, x, weights, ids, after), first)
    assert [p.data_ptr() for p in layer.parameters()] == pointers


def test_experts_in_other_places_than_the_router_thinks_are_noticed(layer):
    gen = h.seeded(0, torch.device("cpu"))
    x, (weights, ids) = h.random_tokens(gen, 40, HIDDEN), h.random_routing(gen, "distinct", 40, TOPK, EXPERTS)
    assert not h.same_bits(run(layer, x, weights, ids, AFTER[0]), run(layer, x, weights, ids, START))


def run(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Returns the result of the layer, with each token routed to one of the places that hold its experts."""
    copies = [[place for place, held in enumerate(places) if held == expert] for expert in range(EXPERTS)]
    chosen = [[copies[e][token % len(copies[e])] for e in row] for token, row in enumerate(ids.tolist())]
    method = layer.quant_method
    tensors = [getattr(layer, name).data for name in method.loading.parameters]
    return fused_moe(x, *tensors, weights, torch.tensor(chosen, dtype=torch.int32), weights=method.weights)
