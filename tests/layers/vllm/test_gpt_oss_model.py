"""vLLM's own gpt-oss loads a checkpoint in the layout of OpenAI's into our layers; only the engine is missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from fp8moe_plugin.layers.vllm.gpt_oss import PackedGptOssMethod, RecodedGptOssMethod
from fp8moe_plugin.settings import settings
from tests.engine import tiny_gpt_oss
from tests.helpers import environment
from tests.layers.gpt_oss import Tensors, assert_holds

pytestmark = pytest.mark.seam
METHODS = {"fp8": RecodedGptOssMethod, "mxfp4": PackedGptOssMethod}
PREFIX = "model.layers.0.mlp.experts."
NAMES = {
    f"{own}_{kind}": f"{PREFIX}{stored}_{stored_kind}"
    for own, stored in (("w13", "gate_up_proj"), ("w2", "down_proj"))
    for kind, stored_kind in (("weight", "blocks"), ("weight_scale", "scales"), ("bias", "bias"))
}


@pytest.fixture(scope="module", params=METHODS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    ModelRegistry.register_model("GptOssForCausalLM", GptOssForCausalLM)  # otherwise vLLM inspects it in a new process
    with environment("FP8MOE_FP4_EXPERTS", request.param):
        yield tiny_gpt_oss.write(tmp_path_factory.mktemp("model") / "gpt_oss", quantized=True)


def experts_of(tensors: Tensors) -> Tensors:
    return {own: tensors[stored].flatten(2) if "blocks" in stored else tensors[stored] for own, stored in NAMES.items()}


def layer_of(model: torch.nn.Module) -> RoutedExperts:
    (layer,) = (module for module in model.modules() if isinstance(module, RoutedExperts))
    return layer


def test_experts_hold_what_the_checkpoint_says(model, tensors):
    layer = layer_of(model)
    assert type(layer.quant_method) is METHODS[settings().fp4_experts]
    assert_holds(layer, experts_of(tensors))


def test_other_layers_stay_as_they_are(model):
    projections = [module for name, module in model.named_modules() if name.endswith(("qkv_proj", "o_proj"))]
    assert {type(module.quant_method) for module in projections} == {UnquantizedLinearMethod}
    assert {module.weight.dtype for module in projections} == {torch.bfloat16}


def test_the_model_loads_other_experts_in_place(model):
    """Dense layers have no weights any more: vLLM has rearranged them for the CPU."""
    layer, others = layer_of(model), dict(tiny_gpt_oss.tensors(quantized=True, seed="other"))
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    model.load_weights((name, tensor) for name, tensor in others.items() if name.startswith(PREFIX))
    layer.quant_method.loading.model.prepare_step()
    assert_holds(layer, experts_of(others))
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses
