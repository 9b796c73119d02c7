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
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.ops.operands import ExpertWeights

# Modules and classes in vllm.model_executor.layers.fused_moe.experts.
PEERS = {
    "triton": ("triton_moe", "TritonExperts"),
    "deepgemm": ("deep_gemm_moe", "DeepGemmExperts"),
    "cutlass": ("triton_cutlass_moe", "TritonOrCutlassExperts"),
    "flashinfer": ("flashinfer_cutlass_moe", "FlashInferExperts"),
}

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # hidden states, router weights, expert ids


def make_peer(name: str, experts: Experts, weights: ExpertWeights, tokens: int, activation: Activation = SILU) -> Layer:
    """Returns one of vLLM's implementations of the experts, with the dispatch and combine for a single rank."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    from fp8moe_plugin.layers.vllm.compat import make_prepare_finalize

    config = vllm_layer(experts, tokens, activation)
    experts_class = _peer_class(name, config)
    (w13, w13_scale), (w2, w2_scale) = _gate_last(weights) if name == "flashinfer" else weights
    scales = fp8_w8a8_moe_quant_config(
        w1_scale=w13_scale,
        w2_scale=w2_scale,
        block_shape=[GROUP, GROUP],
        gemm1_alpha=config.swiglu_alpha,
        gemm1_beta=config.swiglu_beta,
        gemm1_clamp_limit=config.swiglu_limit,
    )
    dispatch = make_prepare_finalize(config, scales, routing_tables=None)
    kernel = modular_kernel.FusedMoEKernel(dispatch, experts_class(moe_config=config, quant_config=scales))
    return lambda x, topk_weights, ids: kernel.apply(
        x, w13, w2, topk_weights, ids, config.activation, experts.experts, None, False
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


def _peer_class(name: str, config: Any) -> Any:
    """Returns vLLM's class for a peer. Raises `UnsupportedError` if it does not support the layer on this machine."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
    from vllm.utils.flashinfer import has_flashinfer_cutlass_fused_moe

    module, class_name = PEERS[name]
    found = getattr(importlib.import_module(f"vllm.model_executor.layers.fused_moe.experts.{module}"), class_name)
    if name == "flashinfer" and not has_flashinfer_cutlass_fused_moe():
        raise UnsupportedError("vLLM cannot use FlashInfer here: it needs the package flashinfer-python and nvcc")
    layout = FusedMoEActivationFormat.Standard
    supported, why = found.is_supported_config(found, config, kFp8Static128BlockSym, kFp8Dynamic128Sym, layout)
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
