"""SGLang's loaders cut tensors of another format than block FP8 for the ranks, from its description alone."""

import pytest

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from fp8moe_plugin.formats.spec import QuantSpec
from tests.formats.fp4 import CHECKPOINT, FP4, RANKS, WIDTH, bits, part_of
from tests.layers.sglang import layers

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_hold_their_part_of_experts(monkeypatch, rank):
    monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(FP4))
    layer = layers.Layer(WIDTH, RANKS, rank).load(CHECKPOINT)
    for name, experts in layer.parts().items():
        assert [bits(part) for part in experts] == [part_of(rank, name, i) for i in range(len(experts))], name
