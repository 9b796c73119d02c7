"""DeepGEMM's older name for the logits over a paged KV cache, with another order of arguments."""

import torch

from fp8moe_plugin import ops
from fp8moe_plugin.ops.indexer import Query


def fp8_paged_mqa_logits(
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: None = None,
) -> torch.Tensor:
    """`fp8_fp4_paged_mqa_logits` without its `logits_dtype`, which comes before `indices`: logits are float32.

    Raises:
        InvalidInputError: see `ops.fp8_paged_mqa_logits`.
    """
    given = (q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits)
    return ops.fp8_paged_mqa_logits(*given, indices=indices)
