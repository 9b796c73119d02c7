"""Plans of the Triton kernels: the kernels that a call launches, and their tiles."""

from dataclasses import dataclass
from typing import NamedTuple

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from fp8moe_plugin.plan.scratch import offsets, scale_pitch, tile_capacity
from fp8moe_plugin.plan.spec import GroupedBy, Grouping, LayerSpec
from fp8moe_plugin.plan.triton.catalog import (
    FEW_ROWS,
    MANY_ROWS,
    MORE_ROWS,
    NARROW_TILE_N,
    TILE_N,
    TritonKey,
    down_key,
    down_small_batch_key,
    expert_tile_rows,
    gate_up_key,
    gate_up_small_batch_key,
    gemm_key,
    padded_experts,
    route_chunks,
)
from fp8moe_plugin.plan.triton.tuning import TRITON_DENSE_SHARE, TRITON_FEW_ROWS, TRITON_SMALL_BATCH


class TritonScratch(NamedTuple):
    """Scratch memory of a layer; `rows` is T * topk."""

    x: int  # e4m3 [T, H]; empty if tokens arrive quantized
    x_scales: int  # float32 [T, H / 128]
    slots: int  # int32 [T, topk]: the row of each (token, expert) pair, -1 for none
    tokens: int  # int32 [rows]: the token of each row
    counts: int  # int32 [chunks, padded experts], see triton_kernels/route.py
    table: int  # int32 [tiles, 4], see triton_kernels/route.py
    num_tiles: int  # int32 [2]: the number of tiles, and of rows
    inner: int  # e4m3 [rows, I]
    inner_scales: int  # float32, of inner, K-major
    down: int  # bfloat16 [rows, H]
    nbytes: int


class TritonSmallBatchScratch(NamedTuple):
    """Scratch memory of a layer in a step of few tokens."""

    inner: int  # bfloat16 [T * topk, I]
    nbytes: int


class TritonBatchedScratch(NamedTuple):
    """Scratch memory of `batched_experts`; `rows` is E * max_m."""

    table: int
    num_tiles: int
    inner: int  # e4m3 [rows, I]
    inner_scales: int  # float32, of inner, K-major
    nbytes: int


class TritonGroupedScratch(NamedTuple):
    """Scratch memory of a grouped GEMM."""

    table: int
    num_tiles: int
    nbytes: int


@dataclass(frozen=True)
class TritonStep:
    """A step of a layer of experts."""

    target: str
    spec: LayerSpec
    tokens: int
    tile_rows: int
    tiles: int  # capacity of the tile table
    gate_up: TritonKey
    down: TritonKey
    scratch: TritonScratch

    @property
    def rows(self) -> int:
        """The number of rows of all experts if no id is out of range."""
        return self.tokens * self.spec.shape.topk


@dataclass(frozen=True)
class TritonSmallBatchStep:
    """A step of few tokens: two kernels. Each program finds the experts of its pairs."""

    target: str
    spec: LayerSpec
    tokens: int
    gate_up: TritonKey
    down: TritonKey
    scratch: TritonSmallBatchScratch


TritonStepPlan = TritonStep | TritonSmallBatchStep


@dataclass(frozen=True)
class TritonGrouped:
    """One grouped GEMM."""

    target: str
    kernel: TritonKey
    tile_rows: int
    tiles: int
    scratch: TritonGroupedScratch


@dataclass(frozen=True)
class TritonBatched:
    """Both GEMMs of experts whose tokens arrive quantized and sorted."""

    target: str
    spec: LayerSpec
    gate_up: TritonKey
    down: TritonKey
    tile_rows: int
    tiles: int
    scratch: TritonBatchedScratch


@dataclass(frozen=True)
class TritonDense:
    """One dense GEMM."""

    kernel: TritonKey
    tile_rows: int
    tile_n: int


def plan_layer(target: str, spec: LayerSpec, tokens: int) -> TritonStepPlan:
    """Returns the plan of a step of `tokens` tokens, at least 1."""
    rows_per_expert = tokens * spec.shape.topk / spec.shape.global_experts
    only_sorted = spec.batch_invariant or spec.quantized or spec.weights is PACKED_MXFP4
    if not only_sorted and rows_per_expert <= TRITON_SMALL_BATCH:
        return triton_small_batch_step(target, spec, tokens)
    return triton_step(target, spec, tokens, _tile_rows(spec, rows_per_expert))


def triton_small_batch_step(target: str, spec: LayerSpec, tokens: int) -> TritonSmallBatchStep:
    """Returns the plan of a step of few tokens, which rarely share an expert."""
    inner = 2 * tokens * spec.shape.topk * spec.shape.intermediate
    return TritonSmallBatchStep(
        target=target,
        spec=spec,
        tokens=tokens,
        gate_up=gate_up_small_batch_key(target, spec),
        down=down_small_batch_key(target, spec),
        scratch=TritonSmallBatchScratch(*offsets(inner)),
    )


def triton_step(target: str, spec: LayerSpec, tokens: int, tile_rows: int) -> TritonStep:
    """Returns the plan of a step in tiles of `tile_rows` rows."""
    topk, hidden, intermediate, experts, _ = spec.shape
    rows, quantized = tokens * topk, 0 if spec.quantized else tokens
    tiles, (chunks, _) = tile_capacity(rows, experts, tile_rows), route_chunks(rows)
    sizes = (
        quantized * hidden,
        4 * quantized * (hidden // GROUP),
        4 * rows,
        4 * rows,
        4 * chunks * padded_experts(experts),
        16 * tiles,
        8,
        rows * intermediate,
        4 * scale_pitch(rows) * (intermediate // GROUP),
        2 * rows * hidden,
    )
    return TritonStep(
        target=target,
        spec=spec,
        tokens=tokens,
        tile_rows=tile_rows,
        tiles=tiles,
        gate_up=gate_up_key(target, tile_rows, spec),
        down=down_key(target, tile_rows, spec),
        scratch=TritonScratch(*offsets(*sizes)),
    )


def _tile_rows(spec: LayerSpec, rows_per_expert: float) -> int:
    few, more = expert_tile_rows(spec.weights)
    return few if not spec.batch_invariant and rows_per_expert <= TRITON_FEW_ROWS else more


def choose_tile_rows(rows_per_expert: float) -> int:
    """Returns the rows per tile for experts with `rows_per_expert` rows on average."""
    return FEW_ROWS if rows_per_expert <= TRITON_FEW_ROWS else MORE_ROWS


def plan_batched(target: str, spec: LayerSpec, max_m: int, expected_m: int) -> TritonBatched:
    """Returns the plan for `[experts, max_m]` rows, of which each expert uses about `expected_m`."""
    tile_rows = _tile_rows(spec, expected_m)
    experts, intermediate = spec.shape.local_experts, spec.shape.intermediate
    rows, tiles = experts * max_m, experts * ceil_div(max_m, tile_rows)
    inner = rows * intermediate, 4 * scale_pitch(rows) * (intermediate // GROUP)
    return TritonBatched(
        target=target,
        spec=spec,
        gate_up=gate_up_key(target, tile_rows, spec),
        down=down_key(target, tile_rows, spec),
        tile_rows=tile_rows,
        tiles=tiles,
        scratch=TritonBatchedScratch(*offsets(16 * tiles, 8, *inner)),
    )


def plan_grouped(target: str, grouping: Grouping, rows: int, groups: int, expected_m: int) -> TritonGrouped:
    """Returns the plan for `rows` rows in at most `groups` groups.

    Args:
        rows: the rows of all groups, including rows without a result.
        expected_m: rows per group on average; unused where each row has the index of its group.
    """
    indexed = grouping.kind is GroupedBy.INDICES
    tile_rows = MORE_ROWS if indexed else choose_tile_rows(expected_m)
    tiles = tile_capacity(rows, rows if indexed else groups, tile_rows)
    return TritonGrouped(
        target, gemm_key(target, tile_rows), tile_rows, tiles, TritonGroupedScratch(*offsets(16 * tiles, 8))
    )


def plan_dense(
    target: str, m: int, n: int, f32: bool, multiprocessors: int, batch_invariant: bool, weights: WeightFormat
) -> TritonDense:
    """Returns the plan of a GEMM with m rows and n columns.

    Args:
        f32: the result is float32, not bfloat16.
        multiprocessors: of the GPU.
        batch_invariant: the same tiles for any number of rows.
    """
    if f32 or batch_invariant:
        return TritonDense(gemm_key(target, MORE_ROWS, f32=f32, weights=weights), MORE_ROWS, TILE_N)
    if m <= FEW_ROWS:
        wide = ceil_div(n, TILE_N) >= multiprocessors * TRITON_DENSE_SHARE
        columns = TILE_N if wide else NARROW_TILE_N
        return TritonDense(gemm_key(target, FEW_ROWS, columns, weights=weights), FEW_ROWS, columns)
    fills = ceil_div(m, MANY_ROWS) * ceil_div(n, TILE_N) >= multiprocessors
    tile_rows = MANY_ROWS if fills else MORE_ROWS
    return TritonDense(gemm_key(target, tile_rows, weights=weights), tile_rows, TILE_N)
