"""vLLM itself builds a model, loads a checkpoint into it and calls its layers; only the engine is missing.

Checkpoints in block FP8, those of compressed-tensors by block and by row, with scales in BF16, and those of ModelOpt,
with a scale for each weight.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

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


CHANGES = {
    "fp8": lambda folder: None,
    "block": compress,
    "row": lambda folder: requantize(folder, BY_ROW),
    "tensor": lambda folder: requantize(folder, MODELOPT),
}


@pytest.fixture(scope="module", params=CHANGES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / f"qwen3_moe-{request.param}"
    write_checkpoint(folder, SHAPE)
    CHANGES[request.param](folder)
    return folder


def both(tensors: Tensors, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and float32 scales of these layers, concatenated along the rows."""
    scale = "weight_scale_inv" if f"{names[0]}.weight_scale_inv" in tensors else "weight_scale"
    weights, scales = ([tensors[f"{name}.{kind}"] for name in names] for kind in ("weight", scale))
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


@pytest.mark.parametrize("on_input", [False, True])
def test_the_modular_kernel_runs_only_where_it_does_more_than_the_op(model, monkeypatch, on_input):
    """Such as multiplying tokens by their routing weights."""
    (layer,) = (module for module in model.modules() if isinstance(module, RoutedExperts))
    kernel, calls = layer.quant_method.moe_kernel, []
    apply = kernel.apply
    monkeypatch.setattr(kernel, "apply", lambda *args, **options: calls.append(args) or apply(*args, **options))
    monkeypatch.setattr(layer, "apply_router_weight_on_input", on_input)
    gen = h.seeded(0, torch.device("cpu"))
    x = h.random_tokens(gen, 5, SHAPE.hidden)
    weights, ids = h.random_routing(gen, "distinct", 5, 1, SHAPE.experts)
    out = layer.forward_modular(x, weights, ids)
    assert len(calls) == on_input
    monkeypatch.setattr(layer, "apply_router_weight_on_input", False)
    expected = layer.forward_modular(x * weights.to(x.dtype), torch.ones_like(weights), ids) if on_input else None
    assert expected is None or h.same_bits(out, expected)


@pytest.mark.parametrize(("layer", "parts"), [("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",))])
def test_the_projections_compute_what_the_checkpoint_says(model, tensors, layer, parts):
    module = model.get_submodule(f"{ATTENTION}.{layer}")
    assert isinstance(module, LinearBase)
    assert type(module.quant_method) is Fp8MoeLinearMethod
    weight, scale = both(tensors, *(f"{ATTENTION}.{part}" for part in parts))
    x = h.random_tokens(h.seeded(1, torch.device("cpu")), 5, weight.shape[1])
    out, _ = module(x)
    assert h.same_bits(out, fp8_linear(x, weight, scale))


def test_a_router_stays_as_it_is(model):
    """A layer that the checkpoint lists as unquantized, or ignores by a pattern, in a quantized model."""
    gate = model.get_submodule("model.layers.0.mlp.gate")
    assert gate.weight.dtype == torch.bfloat16
    assert not isinstance(gate.quant_method, Fp8MoeLinearMethod)
