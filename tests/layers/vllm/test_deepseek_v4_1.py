"""DeepSeek-V4.1 as vLLM makes it: experts with our method, dense layers in FP8 by 32x32 blocks with vLLM's own."""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("vllm.models.deepseek_v41", reason="needs a vLLM with DeepSeek-V4.1")

from vllm.config import set_current_vllm_config
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers import linear, quantization
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import PlatformEnum

from fp8moe_plugin.errors import UnsupportedError
from tests import helpers as h
from tests.checkpoint.engine_models import build
from tests.checkpoint.test_deepseek_v4_1 import CONFIG, DENSE, QUANTIZATION, WHY
from tests.checkpoint.test_model import describe
from tests.layers.vllm.one_rank import Quantized, default_config

pytestmark = pytest.mark.seam

PREFIX, INPUTS, WIDTH = "model.layers.0.ffn.shared_experts.gate_up_proj", 160, 288


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM takes V4.1's config for CUDA alone, and has no MXFP8 kernel for a CPU."""
    platform = mock.Mock(wraps=quantization.current_platform, is_cuda=lambda: True)
    monkeypatch.setattr(quantization, "current_platform", platform)
    plain = {PlatformEnum.CPU: [kernels.EmulationMxfp8LinearKernel]}
    monkeypatch.setattr(kernels, "_POSSIBLE_MXFP8_KERNELS", plain)
    with h.environment("FP8MOE_BACKEND", "reference"):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return describe(tmp_path, CONFIG)


def test_vllm_makes_its_layers(folder):
    layers = {name: module for name, module in build(folder).named_modules() if ".layers." in name}
    ours = [module.quant_method for module in layers.values() if isinstance(module, RoutedExperts)]
    assert Counter(type(method).__name__ for method in ours) == {"PackedMoeMethod": 40}
    dense = {name: type(m.quant_method).__name__ for name, m in layers.items() if isinstance(m, LinearBase)}
    theirs = {name for name, method in dense.items() if method == "ModelOptLinearMethod"}
    assert ours[0].loading.model.fallback.layers == theirs  # logged and counted as the engine's
    assert Counter(re.sub(r".*layers\.\d+\.", "", name) for name in theirs) == DENSE
    assert {*dense.values()} == {"ModelOptLinearMethod", "UnquantizedLinearMethod"}


def test_forbidden_fallback_refuses_it(folder):
    refused = pytest.raises(UnsupportedError, match=f"fused_wqa_wkv {WHY}. Serve it without --quantization fp8moe")
    with h.environment("FP8MOE_FALLBACK", "forbid"), refused:
        build(folder)


def test_it_is_refused_without_a_kernel_of_vllm(folder, monkeypatch):
    monkeypatch.setattr(kernels, "_POSSIBLE_MXFP8_KERNELS", {})
    with pytest.raises(UnsupportedError, match=f"(?s){WHY}, and vLLM's own method cannot take it .*Serve it without"):
        build(folder)


def test_a_layer_equals_that_of_vllm(on_rank):
    on_rank(2, 1)
    checkpoint = QUANTIZATION | {"quant_method": "deepseek_v4_fp8"}  # as vLLM renames it
    own = quantization.get_quantization_config("deepseek_v4_fp8")
    engine, random = copy.copy(default_config()), torch.Generator().manual_seed(0)
    hf_config = SimpleNamespace(expert_dtype="fp4")
    engine.model_config = SimpleNamespace(dtype=torch.bfloat16, model="model", hf_config=hf_config)
    weight = torch.randn(2, 2 * WIDTH, INPUTS, generator=random).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (2, 2 * WIDTH // 32, INPUTS // 32), generator=random, dtype=torch.uint8)
    with set_current_vllm_config(engine):
        layers = [
            linear.MergedColumnParallelLinear(INPUTS, [2 * WIDTH] * 2, False, quant_config=config, prefix=PREFIX)
            for config in (Quantized.from_config(copy.deepcopy(checkpoint)), own.from_config(copy.deepcopy(checkpoint)))
        ]
        for layer in layers:
            for shard in range(2):
                layer.weight.weight_loader(layer.weight, weight[shard], shard)
                layer.weight_scale.weight_loader(layer.weight_scale, exponents[shard], shard)
            layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(3, INPUTS, generator=random).bfloat16()
        ours, theirs = (layer(x)[0] for layer in layers)
    assert h.same_bits(ours, theirs)
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1).repeat_interleave(32, 2)
    expected = (weight.double() * scales)[:, WIDTH:].flatten(0, 1) @ x.double().T
    torch.testing.assert_close(ours.double(), expected.T, rtol=0.02, atol=0.02 * expected.abs().max().item())
