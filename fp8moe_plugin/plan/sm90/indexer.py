"""The kernels of a sparse-attention indexer's logits, their layout, and their division among blocks.

Layout and division match DeepGEMM, because callers rely on them.
"""

import functools

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import MQA_HEADS, SMEM_BYTES
from fp8moe_plugin.plan.sm90.constants import MQA_SPLIT_ROWS
from fp8moe_plugin.quoting import any_of

HEAD_DIMS = (32, 64, 128)
ROW_BYTES = 1024  # a row of logits starts at a multiple of it
WIDE_NEXT_N = 4  # for this next_n, DeepGEMM assigns two multiprocessors to each run


@functools.cache
def mqa_logits_key(heads: int) -> KernelKey:
    """Logits of contiguous KV; it has as many stages as fit."""
    return KernelKey("mqa_logits", (("HEADS", heads),), 384, SMEM_BYTES)


@functools.cache
def paged_mqa_logits_key(heads: int, next_n: int) -> KernelKey:
    """Logits of paged KV; it has as many stages as fit. One kernel for all `next_n` would start more slowly."""
    return KernelKey("paged_mqa_logits", (("HEADS", heads), ("NEXT_N", next_n)), 384, SMEM_BYTES)


@functools.cache
def paged_mqa_metadata_key() -> KernelKey:
    return KernelKey("paged_mqa_metadata", (), 256)


def indexer_refusal(heads: int, dim: int) -> str | None:
    """Returns why no kernel supports an indexer with `heads` heads of `dim` channels, or None if one does."""
    if heads in MQA_HEADS and dim in HEAD_DIMS:
        return None
    return f"it has {heads} heads of {dim} channels, the kernels need {any_of(MQA_HEADS)} of {any_of(HEAD_DIMS)}"


def logits_pitch(columns: int, element_size: int) -> int:
    """Returns the number of elements from one row of logits to the next, for a result of `columns` columns."""
    elements = ROW_BYTES // element_size
    return ceil_div(ceil_div(columns, MQA_SPLIT_ROWS) * MQA_SPLIT_ROWS, elements) * elements


def full_logits_pitch(columns: int, element_size: int) -> int:
    """Returns `logits_pitch` for a result with a column for each KV row.

    It has space for another split, because DeepGEMM writes up to a split past the last column.
    """
    elements = ROW_BYTES // element_size
    return ceil_div(columns + MQA_SPLIT_ROWS, elements) * elements


def blocks_per_run(next_n: int, runs: int, multiprocessors: int) -> int:
    """Returns how many blocks share a run of `get_paged_mqa_logits_metadata`.

    For `WIDE_NEXT_N` tokens, callers request half as many runs as there are multiprocessors.
    """
    return 2 if next_n == WIDE_NEXT_N and 2 * runs <= multiprocessors else 1
