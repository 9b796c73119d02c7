"""Common parts of the ops for the logits of a sparse-attention indexer (the lightning indexer of DeepSeek-V3.2)."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.ops.checks import FP8, check_tensor
from fp8moe_plugin.ops.option_checks import check_one_of
from fp8moe_plugin.plan.sm90.catalog import MQA_HEADS
from fp8moe_plugin.plan.sm90.indexer import HEAD_DIMS

Query = torch.Tensor | tuple[torch.Tensor, None]  # DeepGEMM's `fp8_fp4_` functions take (values, None) without scales
LOGITS_DTYPES = (torch.float32, torch.bfloat16)


def query_values(q: Query) -> torch.Tensor:
    """Returns the values of a query. Raises `InvalidInputError` if it has scales or other parts."""
    if isinstance(q, tuple | list):
        if len(q) != 2:
            raise InvalidInputError(f"q has {len(q)} parts, needs (values, None). Pass e4m3 values, or that pair.")
        if q[1] is not None:
            raise InvalidInputError("q has scales, as FP4 queries have. Pass (e4m3 values, None), scales in weights.")
        return q[0]
    return q


def check_query(q: torch.Tensor, dims: int) -> None:
    """Raise `InvalidInputError` unless these are e4m3 `[.., H, D]`, with supported heads."""
    check_tensor("q", q, dtype=FP8, shape=(None,) * dims)
    check_one_of("q's number of heads", q.shape[-2], MQA_HEADS)
    check_one_of("q's head dimension", q.shape[-1], HEAD_DIMS)


def check_rows_strided(name: str, tensor: torch.Tensor) -> None:
    """Raise `InvalidInputError` unless each row of a `[rows, columns]` tensor is contiguous."""
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise InvalidInputError(
            f"{name} has strides {tensor.stride()}, needs (any, 1): rows may be apart, their elements may not. "
            "Call .contiguous()."
        )


def check_head_weights(weights: torch.Tensor, rows: int, heads: int, device: torch.device) -> None:
    """Raise `InvalidInputError` unless these are float32 `[rows, heads]`; rows may have any stride."""
    check_tensor("weights", weights, dtype=torch.float32, shape=(rows, heads), device=device, contiguous=False)
    check_rows_strided("weights", weights)


def check_lengths(context_lens: torch.Tensor, shape: tuple[int, int] | None, device: torch.device | None) -> None:
    """Raise `InvalidInputError` unless these are int32 `[B, next_n]`; `shape` None: any sizes."""
    check_tensor("context_lens", context_lens, dtype=torch.int32, shape=shape or (None, None), device=device)
    if context_lens.shape[1] == 0:
        raise InvalidInputError("context_lens has no column, needs one for each token of a request. Check its shape.")


def check_no_indices(indices: None) -> None:
    """Raise `InvalidInputError` if there are indices."""
    if indices is not None:
        raise InvalidInputError(
            "indices are given, but requests of unequal next_n have no kernel for Hopper GPUs, as in DeepGEMM. "
            "Pass None, and a row of q for each token."
        )
