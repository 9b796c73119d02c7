"""Plans of grouped GEMMs: consecutive groups of rows, each multiplied by its own weights."""

from dataclasses import dataclass

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import (
    PACKED_FORMATS,
    blocks_of_few_rows,
    gate_up_few_rows_key,
    gate_up_key,
    grouped_gemm_few_rows_key,
    grouped_gemm_key,
)
from fp8moe_plugin.plan.sm90.constants import FEW_ROWS_TILE_N, WIDE_FEW_ROWS_TILE_N
from fp8moe_plugin.plan.sm90.scratch import BatchedScratch, GroupedScratch, batched_scratch, grouped_scratch
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, PACKED_FEW_ROWS, PACKED_WIDE, SHARED, RowTile
from fp8moe_plugin.plan.spec import GroupedBy, Grouping, LayerSpec, Output
from fp8moe_plugin.plan.tuning import (
    BATCHED_FEW_ROWS,
    EARLY_FROM,
    K_BLOCKS_PER_SETUP,
    KEEP_B_UP_TO,
    MULTIPROCESSORS,
    PACKED_WIDE_FROM,
)


@dataclass(frozen=True)
class GroupedPlan:
    """One grouped GEMM."""

    kernel: KernelKey
    blocks: int  # of the grid
    tile: RowTile
    columns_at_once: int  # column tiles that a block takes at once, in the kernel for few rows
    scratch: GroupedScratch


@dataclass(frozen=True)
class BatchedPlan:
    """Both GEMMs of experts whose tokens arrive quantized and sorted."""

    spec: LayerSpec
    gate_up: KernelKey
    down: KernelKey
    blocks: int  # of the grid of GEMM 1
    down_blocks: int  # of the grid of GEMM 2
    tile: RowTile
    columns_at_once: int  # column tiles that a block of GEMM 2 takes at once, in the kernel for few rows
    pdl_down: bool  # GEMM 2 starts (PDL) before GEMM 1 has finished, and waits for the rows of each tile
    scratch: BatchedScratch


def plan_grouped(
    grouping: Grouping,
    rows: int,
    groups: int,
    n: int,
    k: int,
    expected_m: int,
    multiprocessors: int,
    tuning: GpuTuning = UNTUNED,
) -> GroupedPlan:
    """Returns the plan for `[rows, k]` activations in at most `groups` groups, and `[groups, n, k]` weights.

    Args:
        rows: the rows of all groups, including rows without a result.
        expected_m: rows per group on average; unused where each row has the index of its group.
        multiprocessors, tuning: of the GPU.
    """
    if grouping.kind is GroupedBy.INDICES:
        scratch = grouped_scratch(rows, rows, MANY_ROWS.rows, indexed=True)
        return GroupedPlan(grouped_key(MANY_ROWS), multiprocessors, MANY_ROWS, 1, scratch)
    tile = row_tile(FP8_BLOCK, expected_m, tuning)
    columns = columns_at_once(rows, groups, n, k) if tile.streams_weights else 1
    scratch = grouped_scratch(rows, groups, tile.rows, indexed=False)
    return GroupedPlan(grouped_key(tile), multiprocessors, tile, columns, scratch)


def plan_batched(
    spec: LayerSpec,
    max_m: int,
    expected_m: int,
    multiprocessors: int = MULTIPROCESSORS,
    tuning: GpuTuning = UNTUNED,
) -> BatchedPlan:
    """Returns the plan for `[experts, max_m]` rows; each expert uses about `expected_m` of its own."""
    _, hidden, intermediate, experts, _ = spec.shape
    tile = batched_tile(spec.weights, expected_m, tuning)
    few_rows, keep_b = tile.streams_weights, tile is MANY_ROWS and keeps_b(expected_m, intermediate, tuning)
    return BatchedPlan(
        spec=spec,
        gate_up=gate_up_few_rows_key(spec) if few_rows else gate_up_key(spec, gather=False),
        down=grouped_key(tile, keep_b, spec.weights, spec.bias),
        blocks=tile.grid(multiprocessors),
        down_blocks=tile.grid(multiprocessors) * (blocks_of_few_rows(spec.weights) if few_rows else 1),
        tile=tile,
        columns_at_once=columns_at_once(experts * max_m, experts, hidden, intermediate) if few_rows else 1,
        pdl_down=few_rows or down_uses_pdl(expected_m, intermediate, tuning),
        scratch=batched_scratch(experts, max_m, intermediate, tile.rows),
    )


def batched_tile(weights: WeightFormat, expected_m: int, tuning: GpuTuning) -> RowTile:
    """Returns the tiles of batched experts, by how many rows of each the caller expects."""
    if weights not in PACKED_FORMATS and expected_m > BATCHED_FEW_ROWS:
        return MANY_ROWS
    return row_tile(weights, expected_m, tuning)


def row_tile(weights: WeightFormat, rows_per_expert: float, tuning: GpuTuning) -> RowTile:
    """Returns the tiles of experts, by their rows on average over the experts of all ranks."""
    few, many = (PACKED_FEW_ROWS, SHARED) if weights in PACKED_FORMATS else (FEW_ROWS, MANY_ROWS)
    return few if rows_per_expert <= few_rows_per_expert(weights, tuning) else many


def has_wide_tiles(spec: LayerSpec) -> bool:
    """Whether steps may run the kernels for few rows with wide tiles, which do not support further steps."""
    return (
        spec.weights in PACKED_FORMATS and spec.shape.intermediate >= PACKED_WIDE_FROM and not any(spec.further_steps)
    )


def few_rows_per_expert(weights: WeightFormat, tuning: GpuTuning) -> int:
    """Returns the most rows per expert for which the kernels for few rows run, which stream the weights.

    With more, too many experts have more rows than a tile of these kernels and load their weights twice.
    """
    return tuning.packed_few_rows_per_expert if weights in PACKED_FORMATS else tuning.few_rows_per_expert


def grouped_key(
    tile: RowTile, keep_b: bool = False, weights: WeightFormat = FP8_BLOCK, bias: bool = False
) -> KernelKey:
    """Returns the key of the grouped GEMM in such tiles; `keep_b`: see `keeps_b`."""
    if tile.streams_weights:
        return grouped_gemm_few_rows_key(weights, bias, tile.rows)
    return grouped_gemm_key(Output.BF16, keep_b=keep_b, weights=weights, bias=bias)


def down_uses_pdl(rows_per_expert: float, intermediate: int, tuning: GpuTuning) -> bool:
    """Returns whether GEMM 2 starts early (PDL), on SMs where GEMM 1 has no tiles left.

    For the kernels for many rows. With narrow experts and many rows, GEMM 2 instead takes its tiles in a fixed
    order, unless it `keeps_b`. That is 5% faster, but all blocks must start together.

    Args:
        rows_per_expert: on average over the experts of all ranks.
    """
    narrow_and_many = intermediate < EARLY_FROM and rows_per_expert >= tuning.early_below
    return not narrow_and_many or keeps_b(rows_per_expert, intermediate, tuning)


def keeps_b(rows_per_expert: float, intermediate: int, tuning: GpuTuning) -> bool:
    """Returns whether each block of GEMM 2 takes a run of row tiles of the same columns and loads their weights once.

    For the kernels for many rows. This is faster if K is short, so that most bytes that a tile loads are weights,
    and if experts have enough rows for long runs.
    """
    return intermediate <= KEEP_B_UP_TO and rows_per_expert >= tuning.early_below


def columns_at_once(rows: int, groups: int, n: int, k: int, tile: RowTile = FEW_ROWS) -> int:
    """Returns how many column tiles a block of grouped_gemm_few_rows takes at once.

    The number amortises the setup of a tile over about K_BLOCKS_PER_SETUP K blocks, and still gives at least three
    quarters of the SMs work, for `rows` rows in at most `groups` groups.
    """
    tile_n = WIDE_FEW_ROWS_TILE_N if tile is PACKED_WIDE else FEW_ROWS_TILE_N
    column_tiles, k_blocks = ceil_div(n, tile_n), k // GROUP
    fits = [c for c in range(1, ceil_div(K_BLOCKS_PER_SETUP, k_blocks) + 1) if column_tiles % c == 0]
    enough = [c for c in fits if min(rows, groups) * (column_tiles // c) >= MULTIPROCESSORS * 3 // 4]
    return max(enough, default=1)
