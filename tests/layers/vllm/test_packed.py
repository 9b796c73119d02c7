"""Experts that stay in MXFP4: each rank holds exactly its part of the checkpoint's weights, packed."""

import itertools

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.layers.vllm.config import moe_method
from fp8moe_plugin.layers.vllm.entry import Entry
from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod
from fp8moe_plugin.ops.mxfp4 import CHUNK_BYTES, further_steps
from tests.helpers import environment
from tests.layers.experts import EXPERTS, HIDDEN, make_mxfp4
from tests.layers.packed import assert_equal, assert_holds, part_of, weights_of, wide
from tests.layers.vllm import loaded_model
from tests.layers.vllm.loaded_model import INTERMEDIATE, Model, first, second
from tests.layers.vllm.one_rank import PACKED, Layer, load_experts
from tests.layers.vllm.test_config import CHECKPOINT
from tests.layers.vllm.test_expert_format import described
from tests.layers.vllm.test_load_in_place import breaks

pytestmark = pytest.mark.seam
no_engine = loaded_model.no_engine


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize(("intermediate", "ranks", "part"), [(256, 1, 256), (512, 2, 256), (320, 2, 256)])
def test_ranks_hold_their_part(intermediate, ranks, part, widened):
    checkpoint = make_mxfp4(intermediate)
    if widened:
        checkpoint = wide(wide(checkpoint, 1, "w3", "w2"), 2, "w1")
    backwards = dict(reversed(checkpoint.items()))  # exponents before the codes
    for rank, given in itertools.product(range(ranks), (checkpoint, backwards)):
        layer = Layer(intermediate, ranks, rank, PACKED).load(given)
        for expert in range(EXPERTS):
            assert_equal(weights_of(layer, expert), part_of(checkpoint, expert, rank, part, ranks))


@pytest.mark.parametrize("backwards", [False, True])
def test_the_engine_may_overwrite_its_tensors(backwards):
    checkpoint = first("packed")
    layer, given = Layer(INTERMEDIATE, 1, 0, PACKED), list(checkpoint.items())
    for name, tensors in reversed(given) if backwards else given:
        buffer = torch.empty_like(tensors[0])
        for expert, tensor in enumerate(tensors):
            buffer.view(torch.uint8).copy_(tensor.view(torch.uint8))
            load_experts(layer, {name: [None] * expert + [buffer]})
            buffer.view(torch.uint8).fill_(7)
    layer.quant_method.process_weights_after_loading(layer)
    assert_holds(layer, checkpoint)


@pytest.mark.parametrize("load", [Model.reload, Model.load])
@pytest.mark.parametrize("widened", [False, True])
def test_all_experts_are_loaded_again(load, widened):
    before = wide(first("packed"), 1, "w1", "w2") if widened else first("packed")
    model = Model("packed").start(before)
    assert_holds(model.experts, before)
    for checkpoint in (second("packed"), before):
        load(model, checkpoint)
        assert_holds(model.experts, checkpoint)
        model.step()


@pytest.mark.parametrize("end", ["call", "step", "empty reload"])
def test_some_experts_may_be_loaded_in_place(end):
    """By a call of the model's, or, as some of vLLM's transfer engines do, by those of the loaders."""
    old, new = first("packed"), second("packed")
    model = Model("packed").start(old)
    part = {name: [tensors[0], *[None] * (EXPERTS - 1)] for name, tensors in new.items() if name.startswith("w1")}
    if end == "call":
        model.load_weights(named for named in model.tensors(part) if named[0].startswith("experts"))
    else:
        load_experts(model.experts, part)
        model.step() if end == "step" else model.reload_weights([])
    wanted = {name: [part.get(name, tensors)[0], *tensors[1:]] for name, tensors in old.items()}
    assert_holds(model.experts, wanted)


@pytest.mark.parametrize("half", [0, 1])
def test_a_load_that_fails_leaves_no_half_to_the_next_one(half):
    model, checkpoint = Model("packed"), second("packed")
    tensors = [named for named in model.tensors(first("packed")) if named[0].startswith("experts.w1.0")]
    with pytest.raises(OSError, match="disk"):
        model.load_weights(breaks([tensors[half], tensors[half]], 1, OSError("disk")))
    model.load_weights(named for named in model.tensors(checkpoint) if named[0] != tensors[half][0])
    with pytest.raises(CheckpointError, match=r"w13_weight_scale of local expert 0: a tensor is missing"):
        model.experts.quant_method.process_weights_after_loading(model.experts)


def test_experts_are_rows_of_the_parameters():
    """EPLB moves an expert by its index of the first dimension; its bytes do not depend on the others."""
    layer = Layer(INTERMEDIATE, 1, 0, PACKED).load(first("packed"))
    shapes = {name: list(parameter.shape) for name, parameter in layer.named_parameters()}
    k_blocks, rows = HIDDEN // 128, INTERMEDIATE // 128
    assert shapes == {
        "w13_weight": [EXPERTS, 2 * rows, k_blocks * CHUNK_BYTES],
        "w13_weight_scale": [EXPERTS, 2 * rows, k_blocks],
        "w2_weight": [EXPERTS, k_blocks, rows * CHUNK_BYTES],
        "w2_weight_scale": [EXPERTS, k_blocks, rows],
    }


def test_parameters_without_weights_are_valid():
    """An engine may load none, and kernels read tables by the bytes of exponents."""
    layer = Layer(INTERMEDIATE, 1, 0, PACKED)
    for weight in (layer.w13_weight, layer.w2_weight):
        assert not weight.any()
    assert layer.w13_weight_scale.isnan().all()


def test_a_missing_expert_is_noticed():
    checkpoint = first("packed")
    checkpoint["w3_weight"][1] = checkpoint["w3_weight_scale"][1] = None
    with pytest.raises(CheckpointError, match=r"w13_weight_scale of local expert 1: a tensor is missing"):
        Model("packed").start(checkpoint)


@pytest.mark.parametrize("load", [Model.reload, Model.load])
def test_the_next_weights_may_need_fewer_steps(load):
    before = wide(first("packed"), 1, "w1", "w2")
    model = Model("packed").start(before)
    assert_holds(model.experts, before)
    tensors = [parameter.data_ptr() for parameter in model.experts.parameters()]
    load(model, second("packed"))
    model.step()
    assert_holds(model.experts, second("packed"))
    assert [parameter.data_ptr() for parameter in model.experts.parameters()] == tensors
    load(model, before)
    model.step()
    assert_holds(model.experts, before)


@pytest.mark.parametrize("load", [Model.reload, Model.load])
@pytest.mark.parametrize("shard", ["w1", "w2"])
def test_the_next_weights_may_not_need_more_steps(load, shard):
    model = Model("packed").start(first("packed"))
    with pytest.raises(CheckpointError, match=r"need [12] further steps of K, but the running layer has room for 0"):
        load(model, wide(first("packed"), 1, shard))


def test_load_balancing_refuses_further_steps():
    layer = Layer(INTERMEDIATE, 1, 0, PACKED, enable_eplb=True)
    layer.load(first("packed"))
    assert not further_steps(layer.w2_weight, layer.w2_weight_scale)
    with pytest.raises(UnsupportedError, match=r"w2 of expert 1.*Restart without --enable-eplb"):
        layer.load(wide(first("packed"), 1, "w2"))


def test_exponents_that_are_nan_are_refused():
    checkpoint = first("packed")
    checkpoint["w2_weight_scale"][0].view(torch.uint8)[5, 5] = 0xFF
    with pytest.raises(CheckpointError, match="the scales"):
        Layer(INTERMEDIATE, 1, 0, PACKED).load(checkpoint)


def test_a_variable_keeps_experts_in_mxfp4(tmp_path):
    with environment("FP8MOE_FP4_EXPERTS", "mxfp4"):
        config = Entry.from_config(CHECKPOINT | {"quant_method": "deepseek_v4_fp8"})
        config.maybe_update_config(str(tmp_path), hf_config=described(expert_dtype="fp4"))
    assert moe_method(config.spec) is PackedMoeMethod
