"""Where our kernel chooses the experts, and starts the layer sooner than vLLM's router."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.experts import StandardExperts
from fp8moe_plugin.layers.vllm.gate import take_over_gate
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import devices, torch_ops
from fp8moe_plugin.ops.checks import in_place
from fp8moe_plugin.plan.sm90.constants import MAX_ROUTER_EXPERTS, MAX_ROUTER_TOPK
from fp8moe_plugin.settings import batch_invariant, settings


@dataclass(frozen=True)
class StandIn:
    """Our kernel, and vLLM's router for logits that it does not read."""

    experts: StandardExperts
    router: Any  # a `FusedTopKRouter`

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether the kernel chooses from these logits `[T, E]`."""
        known = logits.dtype in (torch.float32, torch.bfloat16) and logits.shape[1] == self.router.global_num_experts
        return known and in_place(logits)

    def apply(self, layer: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The layer, bfloat16 `[T, H]`, from logits that the kernel takes."""
        weights = layer.w13_weight, self.experts.w1_scale, layer.w2_weight, self.experts.w2_scale
        choice = self.router.top_k, self.router.renormalize, compat.padding_of(len(x))
        output = torch.empty_like(x)
        torch_ops.routed_moe(x, *weights, logits, *choice, self.experts.ue8m0, output)
        return output

    def select_experts(
        self, x: torch.Tensor, logits: torch.Tensor, ids_dtype: torch.dtype | None, **rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids `[T, k]` as vLLM's runner has its router choose them."""
        arguments = {"hidden_states": x, "router_logits": logits, "topk_indices_dtype": ids_dtype}
        return self.router.select_experts(**arguments, **rest)


def stand_in(layer: Any, experts: StandardExperts) -> StandIn | None:
    """What stands in for the router of a `RoutedExperts` layer whose tokens stay on this rank; None: nothing does.

    If something does, our kernel also takes over the gate, where it can.

    vLLM's router has to choose where it does more than that: count the load of experts (EPLB), or report which were
    chosen. And where it chooses in another way than by the softmax of all experts, as subclasses of it may.
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
    if experts.moe_config.moe_parallel_config.pcp_size > 1:  # vLLM's padding mask is that of this rank's tokens
        return None
    if router.top_k > MAX_ROUTER_TOPK or batch_invariant():  # vLLM then has a method of its own for the gate
        return None
    if not settings().router:
        log_once(logging.INFO, "experts are chosen by vLLM's router and gate (FP8MOE_ROUTER=0)")
        return None
    log_once(logging.INFO, "experts are chosen by our kernel")
    take_over_gate(layer, device.multiprocessors)
    return StandIn(experts, router)
