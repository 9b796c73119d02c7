"""The gate of a router, whose logits our kernel computes in steps of few tokens."""

import logging
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.ops.router_gemm import STEP, tokens_of_one_round


class GateMethod(UnquantizedLinearMethod):
    """vLLM's method of an unquantized layer, with our kernel in steps of up to `most_tokens` tokens."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.most_tokens = most_tokens

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) <= self.most_tokens and x.dim() == 2 and x.is_contiguous() and not x.data_ptr() % 16:
            return torch_ops.router_gemm(x, layer.weight)
        return super().apply(layer, x, bias)


def take_over_gate(experts: Any, multiprocessors: int) -> None:
    """Have our kernel compute the logits for a `RoutedExperts` layer in short steps.

    Only where vLLM's runner calls the gate, as what a model calls itself is compiled for all numbers of tokens at once;
    and where the gate is a plain product in bfloat16, for which vLLM has no kernel of its own.
    """
    gate = compat.runner_of(experts).gate
    if not isinstance(gate, LinearBase) or type(gate.quant_method) is not UnquantizedLinearMethod:
        return
    weight = gate.weight
    if weight.dtype != torch.bfloat16 or gate.bias is not None or weight.shape[1] % STEP or not weight.is_contiguous():
        return
    most_tokens = tokens_of_one_round(len(weight), multiprocessors)
    if most_tokens:
        gate.quant_method = GateMethod(most_tokens)
        log_once(logging.INFO, f"in steps of up to {most_tokens} tokens, routers' logits are computed by our kernel")
