"""vLLM itself loads checkpoints of compressed-tensors by block and by row, with scales in BF16, and of ModelOpt, with
a scale for each weight, and calls its layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.layers.fused_moe import RoutedExperts

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.ops import fp8_linear, fused_moe
from tests import helpers as h
from tests.compressed import BY_ROW, MODELOPT, compress, requantize

pytestmark = pytest.mark.seam

SHAPE = replace(PRESETS["qwen3_moe", "tiny"], moe_layers=1, block_spread=1.0)
ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["block", "row", "tensor"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / f"qwen3_moe-{request.param}"
    write_checkpoint(folder, SHAPE)
    if request.param == "block":
        compress(folder)
    else:
        requantize(folder, BY_ROW if request.param == "row" else MODELOPT)
    return folder


def both(tensors: Tensors, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and float32 scales of these layers, concatenated along the rows."""
    weights = [tensors[f"{name}.weight"] for name in names]
    scales = [tensors[f"{name}.weight_scale"] for name in names]
    each = zip(weights, scales, strict=True)
    scales = [scale if scale.dim() else scale.expand(len(weight), 1) for weight, scale in each]
    return torch.cat(weights), torch.cat(scales).float()


def test_the_files_belong_to_the_description(checkpoint):
    assert read_model(checkpoint).quantized


def test_the_experts_compute_what_the_checkpoint_says(model, tensors):
    (layer,) = (module for module in model.modules() if isinstance(module, RoutedExperts))
    assert type(layer.quant_method) is Fp8MoeMethod
    parts = []
    for projections in (("gate_proj", "up_proj"), ("down_proj",)):
        experts = [both(tensors, *(f"{EXPERTS}.{e}.{name}" for name in projections)) for e in range(SHAPE.experts)]
        parts += [torch.stack(part) for part in zip(*experts, strict=True)]
    gen = h.seeded(0, torch.device("cpu"))
    x = h.random_tokens(gen, 5, SHAPE.hidden)
    routing = h.random_routing(gen, "distinct", 5, SHAPE.topk, SHAPE.experts)
    wanted = fused_moe(x, *parts, *routing, weights=layer.quant_method.weights)
    assert h.same_bits(layer.forward_modular(x, *routing), wanted)


@pytest.mark.parametrize(("layer", "parts"), [("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",))])
def test_the_projections_compute_what_the_checkpoint_says(model, tensors, layer, parts):
    module = model.get_submodule(f"{ATTENTION}.{layer}")
    assert type(module.quant_method) is Fp8MoeLinearMethod
    weight, scale = both(tensors, *(f"{ATTENTION}.{part}" for part in parts))
    x = h.random_tokens(h.seeded(1, torch.device("cpu")), 5, weight.shape[1])
    out, _ = module(x)
    assert h.same_bits(out, fp8_linear(x, weight, scale))


def test_a_router_that_a_pattern_ignores_stays_as_it_is(model):
    gate = model.get_submodule("model.layers.0.mlp.gate")
    assert gate.weight.dtype == torch.bfloat16
    assert not isinstance(gate.quant_method, Fp8MoeLinearMethod)
