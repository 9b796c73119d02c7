"""The gate of a router, whose logits our kernel computes in steps of few tokens."""

import logging
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.ops.checks import in_place
from fp8moe_plugin.ops.router_gemm import STEP, fastest_up_to


class GateMethod(UnquantizedLinearMethod):
    """Our kernel in steps of up to `most_tokens` tokens, and in others vLLM's method of the same layer."""

    def __init__(self, vllms: UnquantizedLinearMethod, most_tokens: int) -> None:
        self.vllms = vllms
        self.most_tokens = most_tokens

    def process_weights_after_loading(self, layer: Any) -> None:
        self.vllms.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) <= self.most_tokens and x.dim() == 2 and in_place(x):
            return torch_ops.router_gemm(x, layer.weight)
        return self.vllms.apply(layer, x, bias)


def take_over_gate(experts: Any, multiprocessors: int) -> None:
    """Have our kernel compute the logits for a `RoutedExperts` layer in short steps.

    Only where vLLM's runner calls the gate, as what a model calls itself is compiled for all numbers of tokens at once;
    and where the gate is a plain product in bfloat16.
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
