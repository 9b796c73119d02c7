"""Logits of a sparse-attention indexer over contiguous KV: prefill."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.indexer import ContiguousLayout, mqa_logits_launch
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.checks import FP8, CheckedOnce, check_tensor, check_values, debugs
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.indexer import (
    LOGITS_DTYPES,
    Query,
    check_head_weights,
    check_query,
    query_values,
)
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.option_checks import check_int, check_one_of
from fp8moe_plugin.plan.sm90.indexer import full_logits_pitch, logits_pitch


def fp8_mqa_logits(
    q: Query,
    kv: Quantized,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool | int = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`logits[i, j] = kv_scale[j] * sum over h of weights[i, h] * relu(q[i, h] . k[j])` for the KV rows j of token i.

    Sums are float32. Captures in a CUDA graph; the same call gives the same bits. `fp8_fp4_mqa_logits` is another name.

    Args:
        q: e4m3 `[M, H, D]`, or that and None; H 32 or 64, D 32, 64 or 128. Its scales are factors of `weights`.
        kv: e4m3 `[N, D]` and float32 scales `[N]`.
        weights: float32 `[M, H]`; its rows may be any distance apart.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 `[M]` on the device, clamped to `[0, N]`; a row is empty if its end
            is not greater than its start.
        clean_logits: write -inf outside of the rows' ranges; else those columns are not written. An int is taken as
            `max_seqlen_k`, DeepGEMM's sixth argument since 2.8: the result is compressed, with 0 to no column, and
            nothing is cleaned.
        max_seqlen_k: columns of a compressed result, in which column j of row i is KV row `start_i + j`; requires
            `clean_logits=False`. 0: a column for each KV row.
        logits_dtype: float32 or bfloat16.
    Returns:
        `[M, N]` or `[M, max_seqlen_k]`, with rows a multiple of 1 KiB apart.
    Raises:
        InvalidInputError: wrong dtype, shape, stride, device or option.
    """
    compressed, clean = max_seqlen_k != 0, clean_logits is True
    if not isinstance(clean_logits, bool):
        if compressed:
            raise InvalidInputError(
                f"clean_logits is {clean_logits!r}, and max_seqlen_k {max_seqlen_k}. Pass True or False for the former."
            )
        compressed, max_seqlen_k = True, clean_logits
    values = query_values(q)
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        raise InvalidInputError("kv is no pair. Pass (e4m3 values, float32 scales).")
    _check_once(values, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    _check_options(compressed, clean, max_seqlen_k, logits_dtype)
    m, n = values.shape[0], kv[0].shape[0]
    _check_ranges(cu_seq_len_k_start, cu_seq_len_k_end, n, max_seqlen_k if compressed else n)
    columns, size = max_seqlen_k if compressed else n, logits_dtype.itemsize
    pitch = logits_pitch(columns, size) if compressed else full_logits_pitch(columns, size)
    logits = workspace.empty((m, pitch), logits_dtype, values.device)[:, :columns]
    device = devices.sm90_device_of(values)
    if logits.numel() == 0 or n == 0:
        return logits
    if device is None:
        rows = reference.kv_ranges(cu_seq_len_k_start, cu_seq_len_k_end, n, columns)
        reference.mqa_logits(values, kv, weights, rows, logits, compressed, clean)
        return logits
    operands = values, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, logits
    layout = _layout_of(values, kv[0], weights, logits, columns if compressed else 0, clean)
    prepared_mqa_logits(device, layout)(tuple(tensor.data_ptr() for tensor in operands))
    return logits


def _layout_of(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, width: int, clean: bool
) -> ContiguousLayout:
    m, heads, dim = q.shape
    return ContiguousLayout(
        m=m,
        heads=heads,
        dim=dim,
        n=k.shape[0],
        weights_pitch=weights.stride(0),
        logits_pitch=logits.stride(0),
        bf16=logits.dtype == torch.bfloat16,
        width=width,
        clean=clean,
    )


@prepares("fp8_mqa_logits")
def prepared_mqa_logits(device: Device, layout: ContiguousLayout) -> Prepared:
    """Returns a callable that launches `fp8_mqa_logits`, given addresses."""
    return device.prepare([mqa_logits_launch(layout, map(Slot, range(7)), device.multiprocessors)])


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `fp8_mqa_logits`."""
    check_query(q, 3)
    m, heads, dim = q.shape
    check_tensor("kv", k, dtype=FP8, shape=(None, dim), device=q.device)
    check_tensor("kv's scales", scales, dtype=torch.float32, shape=(k.shape[0],), device=q.device)
    check_head_weights(weights, m, heads, q.device)
    for name, tensor in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends)):
        check_tensor(name, tensor, dtype=torch.int32, shape=(m,), device=q.device)


_check_once = CheckedOnce(_check)


def _check_options(compressed: bool, clean: bool, max_seqlen_k: int, logits_dtype: torch.dtype) -> None:
    """Raise `InvalidInputError` unless these are valid options for `fp8_mqa_logits`."""
    check_int("max_seqlen_k", max_seqlen_k)
    if max_seqlen_k < 0:
        raise InvalidInputError(f"max_seqlen_k is {max_seqlen_k}, needs 0 or more. Pass the longest range of a row.")
    check_one_of("logits_dtype", logits_dtype, LOGITS_DTYPES)
    if compressed and clean:
        raise InvalidInputError(
            "max_seqlen_k and clean_logits exclude each other, as in DeepGEMM. Pass clean_logits=False."
        )


def _check_ranges(starts: torch.Tensor, ends: torch.Tensor, n: int, longest: int) -> None:
    """With FP8MOE_DEBUG=1, raise `InvalidInputError` for a range outside of the KV, or wider than the result."""
    if debugs(starts.is_cuda):
        check_values("cu_seq_len_k_start", starts, 0, n)
        check_values("cu_seq_len_k_end", ends, 0, n)
        check_values("a row's range", (ends - starts).clamp(min=0), 0, longest)


fp8_fp4_mqa_logits = fp8_mqa_logits
