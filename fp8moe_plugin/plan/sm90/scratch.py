"""The layout of an op's scratch memory: the offset of each piece, in bytes.

Kernels of a layer run concurrently, so pieces never share memory. A piece that a call does not need is empty.
"""

from typing import NamedTuple

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.scratch import offsets, scale_pitch, tile_capacity
from fp8moe_plugin.plan.sm90.constants import NUM_TILES_LENGTH
from fp8moe_plugin.plan.sm90.tiles import route_chunks
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape


class SortedScratch(NamedTuple):
    """Scratch memory of a layer whose rows are sorted by expert; `rows` is T * topk."""

    x: int  # e4m3 [rows, H], or [T, H] if GEMM 1 gathers; empty if it gathers tokens that arrive quantized
    x_scales: int  # float32, of x; K-major, or row-major if GEMM 1 gathers
    slots: int  # int32 [T, topk]: the row of each (token, expert) pair, -1 for none
    tokens: int  # int32 [rows]: the token of each row; its pair, if rows are pushed
    num_rows: int  # int32 [1]
    expert_counts: int  # uint32 [chunks, ceil(E / 2)], if count_experts runs
    table: int  # int32 [tiles, 4]
    num_tiles: int  # int32 [5]
    done_counters: int  # int32 [1 + tiles * row_counters]
    partial: int  # float32 [splits, rows, 2I], if blocks of GEMM 1 split K
    inner: int  # e4m3 [rows, I]
    inner_scales: int  # float32, of inner, K-major
    down: int  # bfloat16 [rows, H]; empty if rows are pushed
    nbytes: int  # the sum of all pieces


class SmallBatchScratch(NamedTuple):
    """Scratch memory of a small batch; `experts` is min(T * topk, E), the most that can get tokens."""

    inner: int  # e4m3 [experts, padded_tokens, I]
    inner_scales: int  # float32 [experts, I / 128, padded_tokens]
    tokens_written: int  # int32 [experts, I / 128]: tokens whose results GEMM 1 has written
    nbytes: int


class BatchedScratch(NamedTuple):
    """Scratch memory of `batched_experts`; `rows` is E * max_m."""

    table: int  # int32 [tiles, 4]
    num_tiles: int  # int32 [5]
    done_counters: int  # int32 [1 + tiles]
    inner: int  # e4m3 [rows, I]
    inner_scales: int  # float32, of inner, K-major
    nbytes: int


class GroupedScratch(NamedTuple):
    """Scratch memory of a grouped GEMM."""

    table: int  # int32 [tiles, 4]
    num_tiles: int  # int32 [5]
    done_counters: int  # int32 [1 + tiles], if the tiles come from counts
    run_begins: int  # int32 [rows], if the tiles come from indices
    nbytes: int


def sorted_scratch(
    spec: LayerSpec,
    tokens: int,
    tile_rows: int,
    gathers: bool,
    k_splits: int,
    row_counters: int,
    pushes_rows: bool = False,
) -> SortedScratch:
    """Returns the layout for a step; the arguments are fields of `SortedStep` and its tile."""
    topk, hidden, intermediate, local_experts, _ = spec.shape
    rows = tokens * topk
    gathered = 0 if spec.quantized else tokens
    tiles, chunks = tile_capacity(rows, local_experts, tile_rows), route_chunks(rows)
    sizes = (
        (gathered if gathers else rows) * hidden,
        4 * (gathered if gathers else scale_pitch(rows)) * (hidden // GROUP),
        4 * rows,
        4 * rows,
        4,
        4 * chunks * ceil_div(local_experts, 2) if chunks > 1 else 0,
        16 * tiles,
        4 * NUM_TILES_LENGTH,
        4 * (1 + tiles * row_counters),
        8 * k_splits * rows * intermediate if k_splits > 1 else 0,
        rows * intermediate,
        4 * scale_pitch(rows) * (intermediate // GROUP),
        0 if pushes_rows else 2 * rows * hidden,
    )
    return SortedScratch(*offsets(*sizes))


def small_batch_scratch(shape: MoeShape, tokens: int, padded_tokens: int) -> SmallBatchScratch:
    experts, k_blocks = min(tokens * shape.topk, shape.local_experts), shape.intermediate // GROUP
    rows = experts * padded_tokens
    return SmallBatchScratch(*offsets(rows * shape.intermediate, 4 * rows * k_blocks, 4 * experts * k_blocks))


def batched_scratch(experts: int, max_m: int, intermediate: int, tile_rows: int) -> BatchedScratch:
    rows = experts * max_m
    tiles = tile_capacity(rows, experts, tile_rows)
    inner = rows * intermediate, 4 * scale_pitch(rows) * (intermediate // GROUP)
    return BatchedScratch(*offsets(16 * tiles, 4 * NUM_TILES_LENGTH, 4 * (1 + tiles), *inner))


def grouped_scratch(rows: int, groups: int, tile_rows: int, indexed: bool) -> GroupedScratch:
    """Returns the layout for rows in at most `groups` groups; `indexed`: each row has the index of its group."""
    tiles = tile_capacity(rows, groups, tile_rows)
    done_counters, run_begins = (0, 4 * rows) if indexed else (4 * (1 + tiles), 0)
    return GroupedScratch(*offsets(16 * tiles, 4 * NUM_TILES_LENGTH, done_counters, run_begins))


def row_counters(intermediate: int, k_splits: int) -> int:
    """Returns the counters per row tile of GEMM 1.

    One counts stored columns. If K is split, each column has another one, which counts its parts.
    """
    return 1 + intermediate // GROUP if k_splits > 1 else 1
