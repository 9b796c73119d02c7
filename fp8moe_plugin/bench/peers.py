"""vLLM's own backends of a fused-MoE layer, as functions with the arguments of our `fused_moe`.

vLLM is imported inside the functions, so that if a version has moved or removed a backend, only that backend fails.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops.operands import ExpertWeights

# Modules and classes in vllm.model_executor.layers.fused_moe.experts.
PEERS = {
    "triton": ("triton_moe", "TritonExperts"),
    "deepgemm": ("deep_gemm_moe", "DeepGemmExperts"),
    "cutlass": ("triton_cutlass_moe", "TritonOrCutlassExperts"),
    "flashinfer": ("flashinfer_cutlass_moe", "FlashInferExperts"),
}
CHANNEL_PEERS = {"triton": PEERS["triton"], "cutlass": ("cutlass_moe", "CutlassExpertsFp8")}
BY_FORMAT = {FP8_BLOCK: PEERS, FP8_CHANNEL: CHANNEL_PEERS}

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # hidden states, router weights, expert ids


def make_peer(
    name: str,
    experts: Experts,
    weights: ExpertWeights,
    tokens: int,
    activation: Activation = SILU,
    stored: WeightFormat = FP8_BLOCK,
) -> Layer:
    """Returns one of vLLM's implementations of the experts, with the dispatch and combine for a single rank."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    config = vllm_layer(experts, tokens, activation)
    experts_class = _peer_class(name, config, stored)
    (w13, w13_scale), (w2, w2_scale), _ = _gate_last(weights) if name == "flashinfer" else weights
    by_row = stored is FP8_CHANNEL
    scales = fp8_w8a8_moe_quant_config(
        w1_scale=w13_scale,
        w2_scale=w2_scale,
        per_act_token_quant=by_row,
        per_out_ch_quant=by_row,
        block_shape=stored.weight_block,
        **activation_numbers(config),
    )
    return kernel_of(experts_class, config, scales, w13, w2)


def activation_numbers(config: Any) -> dict[str, float | None]:
    """Returns what vLLM's quantization configs repeat of a layer."""
    return {
        "gemm1_alpha": config.swiglu_alpha,
        "gemm1_beta": config.swiglu_beta,
        "gemm1_clamp_limit": config.swiglu_limit,
    }


def kernel_of(experts_class: Any, config: Any, scales: Any, w13: torch.Tensor, w2: torch.Tensor) -> Layer:
    """Returns a layer of vLLM's experts. `scales`: its quantization config."""
    from vllm.model_executor.layers.fused_moe import modular_kernel

    from fp8moe_plugin.layers.vllm.compat import make_prepare_finalize

    dispatch = make_prepare_finalize(config, scales, routing_tables=None)
    kernel = modular_kernel.FusedMoEKernel(dispatch, experts_class(moe_config=config, quant_config=scales))
    return lambda x, topk_weights, ids: kernel.apply(
        x, w13, w2, topk_weights, ids, config.activation, config.num_experts, None, False
    )


def vllm_layer(experts: Experts, tokens: int, activation: Activation = SILU) -> Any:
    """Returns vLLM's `FusedMoEConfig` for a layer and at most `tokens` tokens."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    return FusedMoEConfig(
        num_experts=experts.experts,
        experts_per_token=experts.topk,
        hidden_dim=experts.hidden,
        intermediate_size=experts.intermediate,
        num_local_experts=experts.experts,
        num_logical_experts=experts.experts,
        activation=MoEActivation(activation.kind),
        swiglu_limit=activation.limit,
        swiglu_alpha=None if activation.alpha == SILU.alpha else activation.alpha,
        swiglu_beta=None if activation.beta == SILU.beta else activation.beta,
        device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        max_num_tokens=tokens,
    )


def _peer_class(name: str, config: Any, stored: WeightFormat) -> Any:
    """Returns vLLM's class for a peer. Raises `UnsupportedError` if it does not support the layer on this machine."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.utils.flashinfer import has_flashinfer_cutlass_fused_moe

    module, class_name = BY_FORMAT[stored][name]
    found = getattr(importlib.import_module(f"vllm.model_executor.layers.fused_moe.experts.{module}"), class_name)
    if name == "flashinfer" and not has_flashinfer_cutlass_fused_moe():
        raise UnsupportedError("vLLM cannot use FlashInfer here: it needs the package flashinfer-python and nvcc")
    layout = FusedMoEActivationFormat.Standard
    keys = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
    if stored is FP8_CHANNEL:
        keys = quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym
    supported, why = found.is_supported_config(found, config, *keys, layout)
    if not supported:
        raise UnsupportedError(f"vLLM's {class_name}: {why}")
    return found


def _gate_last(weights: ExpertWeights) -> ExpertWeights:
    """Returns w13 in FlashInfer's order: the up rows, then the gate rows."""
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

    q, scales = weights.w13
    return ExpertWeights((swap_w13_to_w31(q), swap_w13_to_w31(scales)), weights.w2)


@contextlib.contextmanager
def set_up_vllm() -> Iterator[None]:
    """Provide the config and workspace that vLLM's kernels expect from an engine."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is reserved for the table
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    init_workspace_manager(torch.device("cuda"))
    try:
        with set_current_vllm_config(VllmConfig()):
            yield
    finally:
        reset_workspace_manager()
