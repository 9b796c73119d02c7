"""Our kernels in place of vLLM's router and, in short steps, of its gate: the layer starts sooner.

`fused_router` is the entry point; FP8MOE_ROUTER=0 turns it off.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.router.gate import replace_gate
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import devices
from fp8moe_plugin.ops.checks import is_aligned_contiguous
from fp8moe_plugin.plan.sm90.constants import MAX_ROUTER_EXPERTS, MAX_ROUTER_TOPK
from fp8moe_plugin.settings import settings


@dataclass(frozen=True)
class FusedRouter:
    """Our kernel for softmax top-k, with vLLM's router for logits that the kernel does not support."""

    experts: Experts
    fallback: Any  # a `FusedTopKRouter`

    def takes(self, logits: torch.Tensor) -> bool:
        """Returns whether the kernel supports these logits `[T, E]`."""
        known = logits.dtype in (torch.float32, torch.bfloat16) and logits.shape[1] == self.fallback.global_num_experts
        return known and is_aligned_contiguous(logits)

    def run(self, x: torch.Tensor, logits: torch.Tensor, ids_dtype: torch.dtype | None, **rest: Any) -> torch.Tensor:
        """Returns the layer's result, bfloat16 `[T, H]`.

        Args:
            ids_dtype, rest: arguments of vLLM's router.
        """
        if self.takes(logits):
            choice = self.fallback.top_k, self.fallback.renormalize, compat.padding_of(len(x))
            return self.experts.run_routed(x, logits, *choice)
        arguments = {"hidden_states": x, "router_logits": logits, "topk_indices_dtype": ids_dtype}
        return self.experts.run(x, *self.fallback.select_experts(**arguments, **rest))


def fused_router(layer: Any, experts: Experts) -> FusedRouter | None:
    """Returns the replacement for the router of a `RoutedExperts` layer whose tokens stay on this rank, or None.

    If the router is replaced, our kernel also replaces the gate where possible.

    vLLM's router stays if it also counts the load of experts (EPLB) or reports the chosen experts, or if it does not
    choose by the softmax over all experts, like some subclasses.
    """
    device = devices.device_of(layer.w2_weight)
    if device is None or not device.backend.has_all_ops:
        return None
    if layer.expert_map is not None or layer.apply_router_weight_on_input:
        return None
    router = compat.runner_of(layer).router
    if type(router) is not FusedTopKRouter or router.scoring_func != "softmax" or router.eplb_state is not None:
        return None
    number = len(layer.w2_weight)
    if number > MAX_ROUTER_EXPERTS or number != router.global_num_experts or compat.returns_routed_experts():
        return None
    if layer.moe_config.moe_parallel_config.pcp_size > 1:  # vLLM's padding mask covers only this rank's tokens
        return None
    if router.top_k > MAX_ROUTER_TOPK or experts.spec.batch_invariant:  # then vLLM uses another method for the gate
        return None
    if not settings().router:
        log_once(logging.INFO, "experts are chosen by vLLM's router and gate (FP8MOE_ROUTER=0)")
        return None
    log_once(logging.INFO, "experts are chosen by our kernel")
    replace_gate(layer, device.multiprocessors)
    return FusedRouter(experts, router)
