"""SGLang's loaders cut tensors of another format than block FP8 for the ranks, from its description alone."""

import pytest

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import SCALE, QuantSpec
from fp8moe_plugin.layers.sglang.loads import Loads
from tests.formats.fp4 import CHECKPOINT, FP4, RANKS, WIDTH, bits, part_of
from tests.helpers import same_bits
from tests.layers.experts import make_mxfp4, recoded
from tests.layers.sglang import layers
from tests.layers.sglang.layers import in_mxfp4

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("slicing")]


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_hold_their_part_of_experts(monkeypatch, rank):
    monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(FP4))
    layer = layers.Layer(WIDTH, RANKS, rank).load(CHECKPOINT)
    for name, experts in layer.parts().items():
        assert [bits(part) for part in experts] == [part_of(rank, name, i) for i in range(len(experts))], name


@pytest.fixture
def recodes(monkeypatch):
    monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(FP8_BLOCK, recoded_from=MXFP4))
    monkeypatch.setattr(layers.QUANT, "loads", Loads(SCALE))  # with the halves that a failed load leaves


@pytest.mark.usefixtures("recodes")
@pytest.mark.parametrize(("intermediate", "ranks"), [(256, 1), (512, 2), (320, 2)])
def test_experts_in_mxfp4_are_loaded_as_block_fp8(intermediate, ranks):
    checkpoint, wanted = in_mxfp4(intermediate), recoded(make_mxfp4(intermediate))
    backwards = dict(reversed(checkpoint.items()))  # scales before the weights
    for given in (checkpoint, backwards):
        parts = [layers.Layer(intermediate, ranks, rank).load(given).parts() for rank in range(ranks)]
        for expert in range(layers.EXPERTS):
            of_expert = [{name: part[expert] for name, part in found.items()} for found in parts]
            layers.assert_assembled(of_expert, {name: tensors[expert] for name, tensors in wanted.items()}, 2)


@pytest.mark.usefixtures("recodes")
def test_an_update_in_place_brings_both_halves():
    first, second = in_mxfp4(256), {name: tensors[::-1] for name, tensors in in_mxfp4(256).items()}
    layer, fresh = layers.Layer(256, 1, 0).load(first), layers.Layer(256, 1, 0).load(second)
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    layer.load(second)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses
    for mine, its in zip(layer.parameters(), fresh.parameters(), strict=True):
        assert same_bits(mine.data, its.data)


@pytest.mark.usefixtures("recodes")
@pytest.mark.parametrize("name", ["w1_weight", "w2_weight_scale_inv"])
def test_a_missing_half_is_noticed(name):
    checkpoint = in_mxfp4(256)
    checkpoint[name][1] = None
    with pytest.raises(CheckpointError, match=r"L\.w.*_weight of local expert 1: a tensor is missing"):
        layers.Layer(256, 1, 0).load(checkpoint).finish()


@pytest.mark.usefixtures("recodes")
@pytest.mark.parametrize("name", ["w1_weight", "w1_weight_scale_inv"])
def test_a_half_that_comes_once_more_is_refused(name):
    layers.Layer(256, 1, 0).load(in_mxfp4(256)).load({name: in_mxfp4(256)[name][:1]})
    with pytest.raises(CheckpointError, match=r"w1 of expert 0\): .* in MXFP4 arrived without .*once more after both"):
        layers.QUANT.loads.finish()
