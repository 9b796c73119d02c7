"""vLLM's loaders cut tensors of another format than block FP8 for the ranks, from its description alone."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.loading import check_loaded
from fp8moe_plugin.layers.vllm import refusals
from tests.formats.fp4 import CHECKPOINT, FP4, KINDS, RANKS, WIDTH, bits, part_of
from tests.layers.vllm import one_rank

pytestmark = [pytest.mark.seam, pytest.mark.parametrize("rank", range(RANKS))]


@pytest.fixture(autouse=True)
def in_fp4(monkeypatch):
    monkeypatch.setattr(one_rank, "FP8", QuantSpec(FP4, dense=FP4))
    monkeypatch.setattr(refusals, "layer_refusal", lambda spec: None)  # no kernel computes it


def test_ranks_hold_their_part_of_experts(rank):
    layer = one_rank.Layer(WIDTH, RANKS, rank).load(CHECKPOINT)
    for name, parameter in layer.named_parameters():
        check_loaded("L", name, parameter)
    for name, experts in layer.parts().items():
        assert [bits(part) for part in experts] == [part_of(rank, name, i) for i in range(len(experts))], name


def test_ranks_hold_their_part_of_an_mlp(on_rank, rank):
    on_rank(RANKS, rank)
    gate_up, down = one_rank.load_mlp(one_rank.make_mlp(WIDTH), CHECKPOINT, expert=1)
    for kind in KINDS:
        halves = [*getattr(gate_up, kind).data.chunk(2), getattr(down, kind).data]
        for name, part in zip(("w1", "w3", "w2"), halves, strict=True):
            assert bits(part) == part_of(rank, f"{name}_{kind}", 1), (name, kind)
