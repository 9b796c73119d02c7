"""vLLM's all-gather of tokens and reduce-scatter of results, with tokens that are quantized before they are sent."""

from typing import Any

import torch
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import MoEPrepareAndFinalizeNaiveDPEPModular

from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.quantize import quantize_tokens
from fp8moe_plugin.plan.tuning import QUANTIZED_TOKENS


class QuantizedGather(MoEPrepareAndFinalizeNaiveDPEPModular):
    """Sends tokens in e4m3 with their scales in steps of QUANTIZED_TOKENS tokens per rank or more, else in bfloat16.

    Our op quantizes them: with another rounding of the quotient, the experts would compute other results.
    """

    def __init__(self, gather: MoEPrepareAndFinalizeNaiveDPEPModular, ue8m0: bool) -> None:
        super().__init__(gather.is_sequence_parallel, gather.num_dispatchers())
        self.ue8m0 = ue8m0

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any, torch.Tensor | None, torch.Tensor | None]:
        """Returns the tokens of all ranks, their scales or None, no counts, and their ids and weights."""
        if apply_router_weight_on_input or most_tokens(len(a1)) < QUANTIZED_TOKENS:
            rest = num_experts, expert_map, apply_router_weight_on_input, quant_config, defer_input_quant
            gathered: tuple[Any, ...] = super().prepare(a1, topk_weights, topk_ids, *rest)
            return gathered
        q, scales = quantize_tokens(a1, self.ue8m0)
        q, topk_weights, topk_ids, (scales,) = get_ep_group().dispatch(
            q.view(torch.uint8),  # which every backend of torch.distributed moves
            topk_weights,
            topk_ids,
            is_sequence_parallel=self.is_sequence_parallel,
            extra_tensors=[scales],
        )
        return q.view(FP8), scales, None, topk_ids, topk_weights


def most_tokens(tokens: int) -> int:
    """Returns the largest number of tokens of a rank in this step, which all ranks know; `tokens`: of this rank."""
    return max(_sizes() or [tokens])


def all_tokens(tokens: int, ranks: int) -> int:
    """Returns the number of tokens of all ranks in this step; `tokens`: of this rank."""
    return sum(_sizes() or [tokens] * ranks)


def _sizes() -> list[int] | None:
    """Returns the tokens of each rank; None without data parallelism, where ranks have equal numbers of them."""
    metadata = get_forward_context().dp_metadata
    return metadata.local_sizes if metadata else None


def quantized_gather(dispatch: Any, ue8m0: bool) -> Any:
    """Returns a `QuantizedGather` in place of vLLM's all-gather, and any other dispatch as it is."""
    is_gather = type(dispatch) is MoEPrepareAndFinalizeNaiveDPEPModular
    return QuantizedGather(dispatch, ue8m0) if is_gather else dispatch
