"""Logits of a sparse-attention indexer over contiguous KV: prefill."""

from typing import NamedTuple

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launch import Launch, Slot, TensorMap
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference, workspace
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import FP8, CheckedOnce, check_tensor, check_values, debugs
from fp8moe_plugin.ops.indexer import (
    LOGITS_DTYPES,
    ROW_BYTES,
    Query,
    check_head_weights,
    check_query,
    query_map,
    query_values,
)
from fp8moe_plugin.ops.operands import Quantized
from fp8moe_plugin.ops.option_checks import check_int, check_one_of
from fp8moe_plugin.plan.catalog import mqa_logits_key
from fp8moe_plugin.plan.constants import MQA_COLUMNS, MQA_TILE_ROWS
from fp8moe_plugin.plan.mqa import full_logits_pitch, logits_pitch
from fp8moe_plugin.plan.tuning import L2_FETCH


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
        q: e4m3 `[M, H, D]`, or that and None; H 32 or 64, D 32, 64 or 128. Its scales belong into `weights`.
        kv: e4m3 `[N, D]` and float32 scales `[N]`.
        weights: float32 `[M, H]`; its rows may be any distance apart.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 `[M]` on the device, clamped to `[0, N]`; an end that is not behind
            its start is an empty row.
        clean_logits: write -inf outside of the rows' ranges; else those columns are not written. An int is
            `max_seqlen_k`, the sixth argument of DeepGEMM from 2.8 on: the result is compressed, to no column
            with 0, and nothing is cleaned.
        max_seqlen_k: compressed result of so many columns: column j of row i is KV row `start_i + j`. Needs
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
    device = backend.sm90_device_of(values)
    if logits.numel() == 0 or n == 0:
        return logits
    if device is None:
        rows = reference.kv_ranges(cu_seq_len_k_start, cu_seq_len_k_end, n, columns)
        reference.mqa_logits(values, kv, weights, rows, logits, compressed, clean)
        return logits
    operands = values, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, logits
    layout = ContiguousLayout.of(values, kv[0], weights, logits, columns if compressed else 0, clean)
    prepared_mqa_logits(device, layout)(tuple(tensor.data_ptr() for tensor in operands))
    return logits


class ContiguousLayout(NamedTuple):
    """All that a launch of `fp8_mqa_logits` depends on, but for addresses. Pitches are elements from row to row.

    `width`: columns of a compressed result, else 0.
    """

    m: int
    heads: int
    dim: int
    n: int
    weights_pitch: int
    logits_pitch: int
    bf16: bool
    width: int
    clean: bool

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, width: int, clean: bool
    ) -> "ContiguousLayout":
        m, heads, dim = q.shape
        return cls(
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
    """What launches `fp8_mqa_logits`, given the addresses of q, KV, its scales, weights, starts, ends and logits."""
    return device.prepare([mqa_logits_launch(device, layout)])


def mqa_logits_launch(device: Device, layout: ContiguousLayout) -> Launch:
    """The kernel of `fp8_mqa_logits`, on every multiprocessor."""
    q, kv, scales, weights, starts, ends, logits = map(Slot, range(7))
    m, heads, dim, n = layout[:4]
    key = mqa_logits_key(heads)
    return Launch(
        key,
        device.multiprocessors,
        key.arguments(
            q_map=query_map(q, m * heads, dim, MQA_COLUMNS),
            k_map=TensorMap(kv, (dim, n), (dim,), (ROW_BYTES, MQA_TILE_ROWS), 1, L2_FETCH),
            scales=scales,
            weights=weights,
            weights_pitch=layout.weights_pitch,
            starts=starts,
            ends=ends,
            logits=logits,
            logits_pitch=layout.logits_pitch,
            bf16=int(layout.bf16),
            m=m,
            n=n,
            dim=dim,
            width=layout.width,
            clean=int(layout.clean),
        ),
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Raise `InvalidInputError` unless `fp8_mqa_logits` takes these tensors."""
    check_query(q, 3)
    m, heads, dim = q.shape
    check_tensor("kv", k, dtype=FP8, shape=(None, dim), device=q.device)
    check_tensor("kv's scales", scales, dtype=torch.float32, shape=(k.shape[0],), device=q.device)
    check_head_weights(weights, m, heads, q.device)
    for name, tensor in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends)):
        check_tensor(name, tensor, dtype=torch.int32, shape=(m,), device=q.device)


_check_once = CheckedOnce(_check)


def _check_options(compressed: bool, clean: bool, max_seqlen_k: int, logits_dtype: torch.dtype) -> None:
    """Raise `InvalidInputError` unless `fp8_mqa_logits` takes these."""
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
