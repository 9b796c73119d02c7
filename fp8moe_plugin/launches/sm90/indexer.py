"""The launches of the logits of a sparse-attention indexer."""

from collections.abc import Iterable
from typing import NamedTuple

from fp8moe_plugin.jit.launch import Address, Launch, TensorMap
from fp8moe_plugin.plan.sm90.constants import MQA_COLUMNS, MQA_TILE_ROWS
from fp8moe_plugin.plan.sm90.indexer import (
    blocks_per_run,
    mqa_logits_key,
    paged_mqa_logits_key,
    paged_mqa_metadata_key,
)
from fp8moe_plugin.plan.tuning import L2_FETCH

PAGE = MQA_TILE_ROWS  # KV rows
ROW_BYTES = 128  # of a box; TMA pads heads of fewer channels with zeros


class ContiguousLayout(NamedTuple):
    """The shapes, pitches and options of a launch of `fp8_mqa_logits`. A pitch is the elements from row to row."""

    m: int
    heads: int
    dim: int
    n: int
    weights_pitch: int
    logits_pitch: int
    bf16: bool
    width: int  # columns of a compressed result, else 0
    clean: bool


class PagedLayout(NamedTuple):
    """The shapes and pitches of a launch of `fp8_paged_mqa_logits`. A pitch is the elements from row to row."""

    batch: int
    next_n: int
    heads: int
    dim: int
    pages: int
    page_stride: int  # bytes
    weights_pitch: int
    table_pitch: int
    table_width: int
    runs: int  # of the schedule
    logits_pitch: int
    bf16: bool
    most: int  # the longest length of a request


def mqa_logits_launch(layout: ContiguousLayout, addresses: Iterable[Address], multiprocessors: int) -> Launch:
    """Returns the launch of `fp8_mqa_logits`.

    Args:
        addresses: of q, KV, its scales, weights, starts, ends and logits.
    """
    q, kv, scales, weights, starts, ends, logits = addresses
    m, heads, dim, n = layout[:4]
    key = mqa_logits_key(heads)
    return Launch(
        key,
        multiprocessors,
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


def paged_mqa_logits_launch(layout: PagedLayout, addresses: Iterable[Address], multiprocessors: int) -> Launch:
    """Returns the launch of `fp8_paged_mqa_logits`.

    Args:
        addresses: of the op's tensors in the order of its parameters, and of the logits.
    """
    q, kv, weights, context_lens, block_table, schedule, logits = addresses
    batch, next_n, heads, dim = layout[:4]
    key, box = paged_mqa_logits_key(heads, next_n), (ROW_BYTES, PAGE, 1)
    sharers = blocks_per_run(next_n, layout.runs, multiprocessors)
    return Launch(
        key,
        layout.runs * sharers,
        key.arguments(
            q_map=query_map(q, batch * next_n * heads, dim, next_n * heads),
            kv_map=TensorMap(kv, (dim, PAGE, layout.pages), (dim, layout.page_stride), box, 1, L2_FETCH),
            kv=kv,
            page_stride=layout.page_stride,
            weights=weights,
            weights_pitch=layout.weights_pitch,
            context_lens=context_lens,
            block_table=block_table,
            table_pitch=layout.table_pitch,
            table_width=layout.table_width,
            schedule=schedule,
            logits=logits,
            logits_pitch=layout.logits_pitch,
            bf16=int(layout.bf16),
            batch=batch,
            dim=dim,
            most=layout.most,
            sharers=sharers,
        ),
    )


def paged_mqa_metadata_launch(lengths: Address, schedule: Address, batch: int, next_n: int, runs: int) -> Launch:
    """Returns the launch of `get_paged_mqa_logits_metadata`."""
    key = paged_mqa_metadata_key()
    arguments = key.arguments(context_lens=lengths, schedule=schedule, batch=batch, next_n=next_n, blocks=runs)
    return Launch(key, 1, arguments)


def query_map(q: Address, rows: int, dim: int, box_rows: int) -> TensorMap:
    """Returns the TMA descriptor of a query of `rows` (token, head) rows, in boxes of `box_rows`."""
    return TensorMap(q, (dim, rows), (dim,), (ROW_BYTES, box_rows), 1, L2_FETCH)
