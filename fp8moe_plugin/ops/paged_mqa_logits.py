"""Logits of a sparse-attention indexer over paged KV: decode."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.indexer import PAGE, PagedLayout, paged_mqa_logits_launch
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.checks import CheckedOnce, check_tensor, check_values, debugs
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.indexer import (
    LOGITS_DTYPES,
    Query,
    check_head_weights,
    check_lengths,
    check_no_indices,
    check_query,
    check_rows_strided,
    query_values,
)
from fp8moe_plugin.ops.option_checks import check_int, check_one_of
from fp8moe_plugin.plan.sm90.catalog import MQA_NEXT_N
from fp8moe_plugin.plan.sm90.constants import MQA_SPLIT_ROWS
from fp8moe_plugin.plan.sm90.indexer import logits_pitch

SCALE_BYTES = 4  # per KV row, after the values of all rows of the page


def fp8_paged_mqa_logits(
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: None = None,
) -> torch.Tensor:
    """`fp8_mqa_logits` of the `next_n` newest tokens of each request, over all KV of the request.

    Captures in a CUDA graph; the same call gives the same bits. `fp8_fp4_paged_mqa_logits` is another name.

    Args:
        q: e4m3 `[B, next_n, H, D]`, or that and None; next_n 1 to 4, H 32 or 64, D 32, 64 or 128.
        kv_cache: uint8 `[pages, 64, 1, D + 4]`: 64 rows of D e4m3 values, then their 64 float32 scales; the stride of
            pages may be any multiple of 16 bytes.
        weights: float32 `[B * next_n, H]`; rows may have any stride.
        context_lens: int32 `[B, next_n]` on the device; the last one of a request is the length of its KV, 0 allowed.
        block_table: int32 `[B, any]` on the device, the pages of each request in order. Rows may have any stride;
            entries after the end of a request may have any value.
        schedule_meta: int32 `[runs + 1, 2]` from `get_paged_mqa_logits_metadata` for these lengths.
        max_context_len: columns of the result; longer requests are truncated.
        clean_logits: False.
        logits_dtype: float32 or bfloat16.
        indices: None.
    Returns:
        `[B * next_n, max_context_len]`, with rows a multiple of 1 KiB apart; columns from a request's length on are not
        written.
    Raises:
        InvalidInputError: wrong dtype, shape, stride, device or option.
    """
    values = query_values(q)
    _check_once(values, kv_cache, weights, context_lens, block_table, schedule_meta)
    check_int("max_context_len", max_context_len)
    if max_context_len < 1:
        raise InvalidInputError(f"max_context_len is {max_context_len}, needs 1 or more. Pass the longest context.")
    check_one_of("clean_logits", clean_logits, (False,))
    check_one_of("logits_dtype", logits_dtype, LOGITS_DTYPES)
    check_no_indices(indices)
    most = min(max_context_len, block_table.shape[1] * PAGE)
    _check_device_values(kv_cache, context_lens, block_table, schedule_meta, most)
    rows, pitch = len(weights), logits_pitch(max_context_len, logits_dtype.itemsize)
    logits = workspace.empty((rows, pitch), logits_dtype, values.device)[:, :max_context_len]
    device = devices.sm90_device_of(values)
    if rows == 0 or most == 0 or kv_cache.shape[0] == 0:
        return logits
    if device is None:
        lengths = context_lens[:, -1].clamp(0, most)
        reference.paged_mqa_logits(values, kv_cache, weights, lengths, block_table, logits)
        return logits
    operands = values, kv_cache, weights, context_lens, block_table, schedule_meta, logits
    prepared_paged_mqa_logits(device, _layout_of(*operands, most))(tuple(t.data_ptr() for t in operands))
    return logits


def _layout_of(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    logits: torch.Tensor,
    most: int,
) -> PagedLayout:
    batch, next_n, heads, dim = q.shape
    return PagedLayout(
        batch=batch,
        next_n=next_n,
        heads=heads,
        dim=dim,
        pages=kv_cache.shape[0],
        page_stride=kv_cache.stride(0),
        weights_pitch=weights.stride(0),
        table_pitch=block_table.stride(0),
        table_width=block_table.shape[1],
        runs=schedule_meta.shape[0] - 1,
        logits_pitch=logits.stride(0),
        bf16=logits.dtype == torch.bfloat16,
        most=most,
    )


@prepares("fp8_paged_mqa_logits")
def prepared_paged_mqa_logits(device: Device, layout: PagedLayout) -> Prepared:
    """Returns a callable that launches `fp8_paged_mqa_logits`, given addresses."""
    return device.prepare([paged_mqa_logits_launch(layout, map(Slot, range(7)), device.multiprocessors)])


# ---- checks --------------------------------------------------------------------------------------------------------


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `fp8_paged_mqa_logits`."""
    check_query(q, 4)
    batch, next_n, heads, dim = q.shape
    check_one_of("q's next_n", next_n, MQA_NEXT_N)
    _check_cache(kv_cache, dim, q.device)
    check_head_weights(weights, batch * next_n, heads, q.device)
    check_lengths(context_lens, (batch, next_n), q.device)
    shape = (batch, None)
    check_tensor("block_table", block_table, dtype=torch.int32, shape=shape, device=q.device, contiguous=False)
    check_rows_strided("block_table", block_table)
    _check_schedule(schedule_meta, q.device)


_check_once = CheckedOnce(_check)


def _check_cache(kv_cache: torch.Tensor, dim: int, device: torch.device) -> None:
    row = dim + SCALE_BYTES
    shape = (None, PAGE, 1, row)
    check_tensor("kv_cache", kv_cache, dtype=torch.uint8, shape=shape, device=device, contiguous=False)
    stride = kv_cache.stride()
    if stride[1] != row or stride[3] != 1:
        raise InvalidInputError(f"kv_cache has strides {stride}, needs (any, {row}, any, 1). Pass whole pages.")
    if stride[0] % 16 or (stride[0] < PAGE * row and kv_cache.shape[0] > 1):
        raise InvalidInputError(
            f"kv_cache's pages are {stride[0]} bytes apart, needs a multiple of 16 from {PAGE * row} on. "
            "Allocate pages at such distances."
        )


def _check_schedule(schedule_meta: torch.Tensor, device: torch.device) -> None:
    check_tensor("schedule_meta", schedule_meta, dtype=torch.int32, shape=(None, 2), device=device)
    if schedule_meta.shape[0] < 2:
        raise InvalidInputError(
            f"schedule_meta has {schedule_meta.shape[0]} rows, needs 2 or more. Pass what "
            "get_paged_mqa_logits_metadata returns."
        )


def _check_device_values(
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    most: int,
) -> None:
    """With FP8MOE_DEBUG=1, raise `InvalidInputError` for a length, a page or a run that is out of range."""
    if not debugs(context_lens.is_cuda):
        return
    lengths = context_lens[:, -1]
    check_values("context_lens", lengths, 0, most)
    pages = torch.arange(block_table.shape[1], device=block_table.device)
    used = block_table[pages < ((lengths + PAGE - 1) // PAGE).unsqueeze(1)]
    check_values("block_table", used, 0, kv_cache.shape[0] - 1)
    check_values("schedule_meta's requests", schedule_meta[:, 0], 0, len(context_lens))
    check_values("schedule_meta's splits", schedule_meta[:, 1], 0, ceil_div(most, MQA_SPLIT_ROWS))


fp8_fp4_paged_mqa_logits = fp8_paged_mqa_logits
