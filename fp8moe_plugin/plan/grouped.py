"""Plans of GEMMs over rows that come group by group, each group against weights of its own."""

import functools
from dataclasses import dataclass

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.plan.catalog import KernelKey, gate_up_key, grouped_gemm_few_rows_key, grouped_gemm_key
from fp8moe_plugin.plan.constants import FEW_ROWS_TILE, MANY_ROWS_TILE, Output
from fp8moe_plugin.plan.scratch import BatchedScratch, GroupedScratch, batched_scratch, grouped_scratch
from fp8moe_plugin.plan.tuning import EARLY_BELOW, EARLY_FROM, K_BLOCKS_PER_SETUP, KEEP_B_UP_TO, MULTIPROCESSORS


@dataclass(frozen=True)
class GroupedPlan:
    """One grouped GEMM."""

    kernel: KernelKey
    tile_rows: int  # rows of a tile: FEW_ROWS_TILE or MANY_ROWS_TILE
    columns_at_once: int  # columns of tiles that a block takes; of the kernel for few rows
    scratch: GroupedScratch


@dataclass(frozen=True)
class BatchedPlan:
    """Both GEMMs of experts whose tokens have been quantized and sorted; tiles are of MANY_ROWS_TILE rows."""

    gate_up: KernelKey
    down: KernelKey
    early_down: bool  # GEMM 2 starts before GEMM 1 ends, and waits for the rows of each tile
    scratch: BatchedScratch


@functools.lru_cache(maxsize=4096)
def plan_masked(groups: int, max_m: int, n: int, k: int, expected_m: int) -> GroupedPlan:
    """`[groups, max_m, k]` rows, a counted number of each group, against `[groups, n, k]` weights.

    Args:
        expected_m: rows a group on average.
    """
    tile_rows = FEW_ROWS_TILE if expected_m <= FEW_ROWS_TILE else MANY_ROWS_TILE
    rows = groups * max_m
    columns = columns_at_once(rows, groups, n, k) if tile_rows == FEW_ROWS_TILE else 1
    return GroupedPlan(grouped_key(tile_rows), tile_rows, columns, grouped_scratch(rows, groups, tile_rows, False))


@functools.lru_cache(maxsize=4096)
def plan_contiguous(rows: int) -> GroupedPlan:
    """`rows` rows, each with the index of its group."""
    return GroupedPlan(
        grouped_key(MANY_ROWS_TILE), MANY_ROWS_TILE, 1, grouped_scratch(rows, rows, MANY_ROWS_TILE, True)
    )


@functools.lru_cache(maxsize=4096)
def plan_batched(experts: int, max_m: int, intermediate: int, expected_m: int, ue8m0: bool) -> BatchedPlan:
    """`[experts, max_m]` rows; each expert has about `expected_m` of them."""
    keep_b = keeps_b(expected_m, intermediate)
    return BatchedPlan(
        gate_up=gate_up_key(ue8m0, gather=False),
        down=grouped_key(MANY_ROWS_TILE, keep_b),
        early_down=starts_early(expected_m, intermediate),
        scratch=batched_scratch(experts, max_m, intermediate, MANY_ROWS_TILE),
    )


def grouped_key(tile_rows: int, keep_b: bool = False) -> KernelKey:
    """The GEMM of grouped rows in tiles of `tile_rows`; `keep_b`: see `keeps_b`."""
    return grouped_gemm_few_rows_key() if tile_rows == FEW_ROWS_TILE else grouped_gemm_key(Output.BF16, keep_b=keep_b)


def starts_early(rows_per_expert: float, intermediate: int) -> bool:
    """Whether GEMM 2 takes multiprocessors that GEMM 1 has no tiles left for, instead of waiting until it ends.

    Of tiles of MANY_ROWS_TILE. With narrow experts and many rows GEMM 2 takes its tiles in a fixed order instead, which
    is 5% faster and needs all blocks to start together; unless it `keeps_b`. `rows_per_expert` is the average, also
    over experts of other ranks.
    """
    narrow_and_many = intermediate < EARLY_FROM and rows_per_expert >= EARLY_BELOW
    return not narrow_and_many or keeps_b(rows_per_expert, intermediate)


def keeps_b(rows_per_expert: float, intermediate: int) -> bool:
    """Whether blocks of GEMM 2 take runs of row tiles of the same columns, and load the weights of a run once.

    Of tiles of MANY_ROWS_TILE. That pays where K is short, so that weights are most of what a tile loads, and where
    experts have so many rows that runs are long.
    """
    return intermediate <= KEEP_B_UP_TO and rows_per_expert >= EARLY_BELOW


def columns_at_once(rows: int, groups: int, n: int, k: int) -> int:
    """How many columns of tiles a block of grouped_gemm_few_rows takes, of `rows` rows in at most `groups` groups.

    As many as amortise the setup of a tile over about K_BLOCKS_PER_SETUP K blocks, while there are tiles for all
    multiprocessors.
    """
    column_tiles, k_blocks = ceil_div(n, GROUP), k // GROUP
    fits = [c for c in range(1, ceil_div(K_BLOCKS_PER_SETUP, k_blocks) + 1) if column_tiles % c == 0]
    enough = [c for c in fits if min(rows, groups) * (column_tiles // c) >= MULTIPROCESSORS * 3 // 4]
    return max(enough, default=1)
