"""Layers of experts in MXFP4: by other kernels, and by ours from the packed and from the re-encoded weights.

- `marlin`: vLLM's W4A16, its default for DeepSeek-V4 on Hopper up to 0.26.
- `humming`, `humming-contiguous`: W4A8, vLLM 0.33's default there, in its layouts for tensor and expert parallelism.
  Their steps are in `benchmarks.layer.humming`.

All get the same weights, which block FP8 represents exactly. They are converted once for all numbers of tokens.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

import torch

from benchmarks.layer import humming
from fp8moe_plugin.bench.layer import Maker, make_ours
from fp8moe_plugin.bench.packed import packed
from fp8moe_plugin.bench.peers import Layer, activation_numbers, kernel_of, vllm_layer
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.plan.spec import LayerSpec

HUMMING = {"humming": humming.INDEXED, "humming-contiguous": humming.CONTIGUOUS}
FP4_PEERS = ("marlin", *HUMMING)


def make_packed(weights: ExpertWeights, spec: LayerSpec) -> Maker:
    """Returns what makes our layer from the packed weights."""
    converted = packed(weights)
    return lambda experts, _, tokens: make_ours(experts, converted, tokens, spec._replace(weights=PACKED_MXFP4))


def make_peers(
    names: Iterable[str], experts: Experts, weights: ExpertWeights, activation: Activation
) -> dict[str, Maker]:
    """Returns what makes the peers' layers. A peer that cannot convert the weights fails there."""
    prepared = functools.cache(lambda: [humming.HummingGemm(humming.W4A8, weight) for weight in weights[:2]])

    def by_humming(layout: str, experts: Experts, _: ExpertWeights, tokens: int) -> Layer:
        return humming.humming_layer(prepared(), layout, experts, tokens, activation)

    makers: dict[str, Maker] = {name: partial(by_humming, layout) for name, layout in HUMMING.items()}
    makers["marlin"] = _marlin(weights, activation)
    return {name: makers[name] for name in names}


def _marlin(weights: ExpertWeights, activation: Activation) -> Maker:
    @functools.cache
    def prepared() -> tuple[torch.Tensor, ...]:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

        (w13, w13_exponents), (w2, w2_exponents) = weights.w13, weights.w2
        layer = SimpleNamespace(params_dtype=torch.bfloat16)
        tensors = prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, w13_exponents, w2_exponents, None, None)
        return tuple(tensors[:4])

    def make(experts: Experts, _: ExpertWeights, tokens: int) -> Layer:
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

        w13, w2, w13_scale, w2_scale = prepared()
        config = vllm_layer(experts, tokens, activation)
        scales = mxfp4_w4a16_moe_quant_config(w1_scale=w13_scale, w2_scale=w2_scale, **activation_numbers(config))
        return kernel_of(MarlinExperts, config, scales, w13, w2)

    return make


def compile_humming(names: Iterable[str], layers: Iterable[tuple[Experts, Activation]], tokens: Iterable[int]) -> None:
    """Compile Humming's kernels for these layers in parallel; one after the other, at its first call, takes minutes."""
    layouts = [HUMMING[name] for name in names if name in HUMMING]
    if not layouts or importlib.util.find_spec("humming") is None:
        return
    jobs: list[Callable[[], object]] = [
        job
        for experts, activation in layers
        for layout in layouts
        for job in humming.layer_jobs(humming.W4A8, layout, experts, list(tokens), activation)
    ]
    print(f"{len(jobs)} kernels of Humming to compile, {humming.compile_ahead(jobs)} failed", flush=True)
