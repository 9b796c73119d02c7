"""The gate of a router. Our kernel computes its logits in short steps."""

import logging
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from fp8moe_plugin.launches.sm90.router import STEP
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.ops.checks import is_aligned_contiguous
from fp8moe_plugin.ops.router_gemm import fastest_up_to


class GateMethod(UnquantizedLinearMethod):
    """Our kernel in steps of up to `most_tokens` tokens, and vLLM's own method in longer steps."""

    def __init__(self, fallback: UnquantizedLinearMethod, most_tokens: int) -> None:
        self.fallback = fallback
        self.most_tokens = most_tokens

    def process_weights_after_loading(self, layer: Any) -> None:
        self.fallback.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) <= self.most_tokens and x.dim() == 2 and is_aligned_contiguous(x):
            return torch_ops.router_gemm(x, layer.weight)
        return self.fallback.apply(layer, x, bias)


def replace_gate(experts: Any, multiprocessors: int) -> None:
    """Make our kernel compute the logits for a `RoutedExperts` layer in short steps.

    Only for gates that vLLM's runner calls: a gate that the model calls is compiled for all numbers of tokens at once.
    The gate must be a plain bfloat16 product.
    """
    gate = compat.called_gate(compat.runner_of(experts))
    if not isinstance(gate, LinearBase) or type(gate.quant_method) is not UnquantizedLinearMethod:
        return
    weight = gate.weight
    if weight.dtype != torch.bfloat16 or gate.bias is not None or weight.shape[1] % STEP or not weight.is_contiguous():
        return
    if most_tokens := fastest_up_to(len(weight), multiprocessors):
        gate.quant_method = GateMethod(gate.quant_method, most_tokens)
        log_once(logging.INFO, f"in steps of up to {most_tokens} tokens, routers' logits are computed by our kernel")
