"""vLLM loads the biases of experts: all ranks have their part of w13's, the first one w2's."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from tests.layers.conformance import INTERMEDIATE, OAI, Cell, assert_computed, make_call
from tests.layers.experts import EXPERTS, HIDDEN, make_checkpoint, with_biases
from tests.layers.vllm.one_rank import Layer, default_config

NUMBERS = {f"swiglu_{name}": getattr(OAI, name) for name in ("limit", "alpha", "beta")}
MOE = {"has_bias": True, "activation": MoEActivation(OAI.kind), **NUMBERS}
CALL = make_call(Cell(FP8_BLOCK, OAI, True))


def finished(layer: Layer) -> Layer:
    with set_current_vllm_config(default_config()):
        layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.seam
@pytest.mark.parametrize(("intermediate", "ranks", "channels"), [(512, 2, 256), (320, 2, 256), (96, 1, 128)])
def test_ranks_hold_their_part(intermediate, ranks, channels):
    checkpoint = with_biases({}, intermediate)
    whole = {name: torch.stack(tensors).float() for name, tensors in checkpoint.items()}
    layers = [Layer(intermediate, ranks, rank, moe=MOE).load(checkpoint) for rank in range(ranks)]
    for name, half in (("w1_bias", 0), ("w3_bias", 1)):
        assembled = torch.cat([layer.w13_bias.data.chunk(2, 1)[half] for layer in layers], 1)
        assert assembled.shape == (EXPERTS, ranks * channels)
        assert torch.equal(assembled[:, :intermediate], whole[name])
        assert not assembled[:, intermediate:].any()
    assert torch.equal(layers[0].w2_bias, whole["w2_bias"])
    assert not any(layer.w2_bias.any() for layer in layers[1:])


def test_the_ranks_add_up_to_the_layer(workspaces):
    parts = []
    for rank in range(2):
        layer = finished(Layer(INTERMEDIATE, 2, rank, moe=MOE).load(CALL.checkpoint))
        parts.append(layer.quant_method.apply(layer, CALL.x, CALL.weights, CALL.ids, None, None).double())
    assert_computed(sum(parts).bfloat16(), CALL)


@pytest.mark.parametrize("missing", ["w1_bias", "w2_bias"])
def test_a_missing_bias_is_noticed(workspaces, missing):
    tensors = {**CALL.checkpoint, missing: [*CALL.checkpoint[missing][:-1], None]}
    with pytest.raises(CheckpointError, match=r"L\.w\d+_bias: a tensor is missing from the checkpoint, or holds NaN"):
        finished(Layer(INTERMEDIATE, 1, 0, moe=MOE).load(tensors))


@pytest.mark.seam
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda bias: bias[:-1], "has shape .* but must be a float for each of"),
        (lambda bias: bias[None], "has shape .* but must be a float for each of"),
        (torch.Tensor.int, "and dtype torch.int32, but must be a float for each of"),
        (lambda bias: bias * float("nan"), "holds NaN or infinity, so it is damaged"),
    ],
)
@pytest.mark.parametrize("name", ["w3_bias", "w2_bias"])
def test_a_damaged_bias_is_refused(name, damage, message):
    checkpoint = with_biases(make_checkpoint(256), 256)
    checkpoint[name] = list(map(damage, checkpoint[name]))
    with pytest.raises(CheckpointError, match=message):
        Layer(256, 1, 0, moe=MOE).load(checkpoint)


def test_biases_are_reloaded_into_the_same_memory(workspaces):
    layer = Layer(INTERMEDIATE, 1, 0, moe=MOE)
    layerwise.record_metadata_for_reloading(layer)
    finished(layer.load(CALL.checkpoint))
    addresses = layer.w13_bias.data_ptr(), layer.w2_bias.data_ptr()
    others = {
        name: [tensor * 2 for tensor in tensors] if "bias" in name else tensors
        for name, tensors in CALL.checkpoint.items()
    }
    with set_current_vllm_config(default_config()), torch.device("cpu"):
        layerwise.initialize_layerwise_reload(layer)
        layer.load(others)
        layerwise.finalize_layerwise_reload(layer, None)
    assert (layer.w13_bias.data_ptr(), layer.w2_bias.data_ptr()) == addresses
    assert torch.equal(layer.w2_bias[0], others["w2_bias"][0].float())
    assert layer.w2_bias.shape == (EXPERTS, HIDDEN)
