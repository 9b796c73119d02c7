"""Layers of experts in MXFP4: by other kernels, and by ours from the packed and from the re-encoded weights.

- `marlin`: vLLM's W4A16, its default for DeepSeek-V4 on Hopper up to 0.26.
- `triton_kernels`: OpenAI's W4A16 in vLLM, its default for gpt-oss on Hopper, but with given experts instead of logits.
  DeepSeek-V4 gets the class of `--moe-backend triton_unfused`, which no release chooses by itself.
- `humming`, `humming-contiguous`: W4A8, vLLM 0.33's default there, in its layouts for tensor and expert parallelism.
  Their steps are in `benchmarks.layer.humming`.
- `flashinfer`: FlashInfer's CUTLASS kernels in W4A8 after Humming's format, as SGLang offers them for DeepSeek-V4 on
  Hopper: e4m3 activations with a scale per row. Its own tuner chooses their tiles for each number of tokens.

All get the same weights, which block FP8 represents exactly. They are converted once for all numbers of tokens.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

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
HUMMING_COMPENSATION = 2.0**6  # the biases of e4m3 and e2m1 differ by 6; FlashInfer leaves this factor to its callers
FP4_PEERS = ("marlin", "triton_kernels", *HUMMING, "flashinfer")


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
    makers["triton_kernels"] = _triton_kernels(weights, activation)
    makers["flashinfer"] = _flashinfer(weights, activation)
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


def _triton_kernels(weights: ExpertWeights, activation: Activation) -> Maker:
    fused = activation.kind == "swigluoai_uninterleave"  # the only one that GEMM 1 of triton_kernels applies

    @functools.cache
    def prepared() -> tuple[Any, ...]:
        from vllm.model_executor.layers.fused_moe.oracle import mxfp4

        def rows(tensor: torch.Tensor) -> torch.Tensor:  # gate and up alternate in gpt-oss's checkpoints
            return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if fused else tensor

        (w13, w13_exponents), (w2, w2_exponents) = weights.w13, weights.w2
        layer = SimpleNamespace(w13_weight=None, w2_weight=None, w13_weight_scale=None, w2_weight_scale=None)
        tensors = mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
            mxfp4.Mxfp4MoeBackend.TRITON, layer, rows(w13), w2, rows(w13_exponents), w2_exponents
        )
        return tuple(tensors[:4])

    def make(experts: Experts, _: ExpertWeights, tokens: int) -> Layer:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as triton_kernels_moe

        config = vllm_layer(experts, tokens, activation)
        experts_class = triton_kernels_moe.UnfusedOAITritonExperts
        if fused:
            config.activation = MoEActivation.SWIGLUOAI  # its limit and alpha are constants in vLLM, those of gpt-oss
            experts_class = triton_kernels_moe.OAITritonExperts
        w13, w2, w13_precision, w2_precision = prepared()
        scales = mxfp4_w4a16_moe_quant_config(
            w1_scale=w13_precision, w2_scale=w2_precision, **activation_numbers(config)
        )
        return kernel_of(experts_class, config, scales, w13, w2)

    return make


def _flashinfer(weights: ExpertWeights, activation: Activation) -> Maker:
    @functools.cache
    def prepared() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        from flashinfer.fused_moe import preprocess_moe_weights_for_sm90_mixed_gemm_humming

        one = torch.ones((), device=weights.w2[0].device)
        codes, scales = [], []
        w13 = (torch.cat(tensor.chunk(2, 1)[::-1], 1) for tensor in weights.w13)  # up rows first
        for weight in (w13, weights.w2):
            experts = zip(*(tensor.split(1) for tensor in weight), strict=True)  # more at once would take 80 GB
            converted = [preprocess_moe_weights_for_sm90_mixed_gemm_humming(*expert) for expert in experts]
            w, scale, residual = (torch.cat(parts) for parts in zip(*converted, strict=True))
            codes.append(w)
            scales += [scale.view(torch.int32), residual * HUMMING_COMPENSATION, one]
        return codes, scales[:-1]

    def make(experts: Experts, _: ExpertWeights, tokens: int) -> Layer:
        from flashinfer import autotune
        from flashinfer.fused_moe import cutlass_fused_moe

        codes, scales = prepared()
        numbers = {"alpha": activation.alpha, "beta": activation.beta, "limit": activation.limit}
        per_expert = {
            f"swiglu_{name}": torch.full((experts.experts,), value, device=codes[0].device)
            for name, value in numbers.items()
        }

        def layer(x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor, tune: bool = False) -> torch.Tensor:
            with autotune(tune, tuning_buckets=(tokens,)):
                return cutlass_fused_moe(
                    x, ids, topk_weights, *codes, x.dtype, scales, **per_expert, use_w4_group_scaling=True,
                    use_wfp4afp8_humming=True,
                )[0]  # fmt: skip

        with torch.device(codes[0].device):
            x = torch.zeros(tokens, experts.hidden, dtype=torch.bfloat16)
            ids = torch.arange(experts.topk, dtype=torch.int32).repeat(tokens, 1)
            layer(x, torch.ones(ids.shape), ids, tune=True)
        return layer

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
