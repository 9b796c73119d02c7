"""The plan of a dense GEMM."""

import itertools
from dataclasses import dataclass, replace

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import (
    DENSE_CLUSTER,
    DENSE_CLUSTER_TILE_N,
    DENSE_FEW_TILE_ROWS,
    DENSE_TILE_N,
    DENSE_TILE_ROWS,
    GROUPED_TILE_N,
    dense_gemm_few_rows_key,
    dense_gemm_key,
    dense_gemm_many_rows_key,
    dense_variant,
    grouped_gemm_key,
)
from fp8moe_plugin.plan.sm90.constants import DENSE_FEW_ROWS_TILE_N, MANY_ROWS_TILE
from fp8moe_plugin.plan.sm90.tiles import MANY_ROWS, count_row_tiles
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.plan.tuning import (
    DENSE_CLUSTER_COST,
    DENSE_COST,
    DENSE_MANY_ROWS_TILE_N,
    DENSE_ROWS,
    DENSE_SPLITS,
    DENSE_STORE,
    DENSE_WAVE_COLUMNS,
    DENSE_WAVE_K,
    DENSE_WAVE_ROWS,
    L2_BYTES,
    LONG_K,
    MULTIPROCESSORS,
)


@dataclass(frozen=True)
class DensePlan:
    """One dense GEMM."""

    kernel: KernelKey
    output: Output
    tile_rows: int
    tile_n: int
    blocks: int  # of the grid
    cluster: int = 1  # blocks that share a tile by splitting K

    @property
    def is_grouped(self) -> bool:
        """Whether grouped_gemm computes it. Only other kernels start before rows are quantized (PDL) or add a bias."""
        return self.kernel.source == "grouped_gemm"


def plan_dense(
    m: int,
    n: int,
    k: int,
    output: Output,
    multiprocessors: int = MULTIPROCESSORS,
    batch_invariant: bool = False,
    weights: WeightFormat = FP8_BLOCK,
    biased: bool = False,
) -> DensePlan:
    """Returns the plan of a GEMM of `[m, k]` activations and `[n, k]` weights.

    BF16: dense_gemm_few_rows where it applies; else dense_gemm for up to DENSE_ROWS rows, or if its largest tiles fit
    one wave; else the kernel whose waves take the least time. Other outputs: always grouped_gemm with one group.

    Args:
        multiprocessors: of the GPU.
        batch_invariant: never splits K.
        weights, biased: their format, and whether there is a bias, BF16 only; they decide which variant of a kernel
            runs, and nothing else. grouped_gemm adds no bias.
    """
    plan = _plan_blocks(m, n, k, output, multiprocessors, batch_invariant)
    return replace(plan, kernel=dense_variant(plan.kernel, weights, biased and not plan.is_grouped))


def _plan_blocks(m: int, n: int, k: int, output: Output, multiprocessors: int, batch_invariant: bool) -> DensePlan:
    """Returns the plan for weights in block FP8."""
    if output != Output.BF16:
        return grouped(m, n, output, multiprocessors)
    if m <= DENSE_FEW_TILE_ROWS[-1] and splits_k(n, k) and not batch_invariant:
        plan = few_rows(m, n)
        if plan.blocks <= multiprocessors:
            return plan
    one_wave = ceil_div(m, DENSE_TILE_ROWS[-1]) * ceil_div(n, DENSE_TILE_N[-1]) <= multiprocessors
    if m <= DENSE_ROWS or one_wave:
        return tiled(m, n, *fastest_tile(m, n, k, multiprocessors), multiprocessors)
    return fastest_by_waves(m, n, k, multiprocessors)


def few_rows(m: int, n: int, cluster: int = DENSE_SPLITS) -> DensePlan:
    """Returns the plan of dense_gemm_few_rows.

    Splits K: with few column tiles, a block that covers all of K is too slow.
    """
    tile_rows = next(rows for rows in DENSE_FEW_TILE_ROWS if m <= rows)
    blocks = ceil_div(n, DENSE_FEW_ROWS_TILE_N) * cluster
    kernel = dense_gemm_few_rows_key()
    return DensePlan(kernel, Output.BF16, tile_rows, DENSE_FEW_ROWS_TILE_N, blocks, cluster)


def tiled(m: int, n: int, tile_rows: int, tile_n: int, multiprocessors: int) -> DensePlan:
    """Returns the plan of dense_gemm in tiles of `[tile_rows, tile_n]`."""
    blocks = min(ceil_div(m, tile_rows) * ceil_div(n, tile_n), multiprocessors)
    return DensePlan(dense_gemm_key(tile_rows), Output.BF16, tile_rows, tile_n, blocks)


def many_rows(m: int, n: int, tile_n: int, multiprocessors: int) -> DensePlan:
    """Returns the plan of dense_gemm_many_rows in tiles of `tile_n` columns. Its blocks form clusters."""
    blocks = multiprocessors // DENSE_CLUSTER * DENSE_CLUSTER
    kernel = dense_gemm_many_rows_key(tile_n)
    return DensePlan(kernel, Output.BF16, MANY_ROWS_TILE, tile_n, blocks)


def grouped(m: int, n: int, output: Output, multiprocessors: int) -> DensePlan:
    """Returns the plan of grouped_gemm with one group.

    Tiles are narrow if the output is not BF16 and all narrow tiles fit one wave.
    """
    narrow, wide = GROUPED_TILE_N
    one_wave = count_row_tiles(m, MANY_ROWS) * ceil_div(n, narrow) <= multiprocessors
    tile_n = narrow if output != Output.BF16 and one_wave else wide
    return DensePlan(grouped_gemm_key(output, tile_n), output, MANY_ROWS_TILE, tile_n, multiprocessors)


def splits_k(n: int, k: int) -> bool:
    """Returns whether a GEMM of few rows splits K: K is long, and there is an SM for each block of the clusters."""
    return k >= LONG_K and DENSE_SPLITS * ceil_div(n, DENSE_FEW_ROWS_TILE_N) <= MULTIPROCESSORS


def fastest_tile(m: int, n: int, k: int, multiprocessors: int) -> tuple[int, int]:
    """Returns the rows and columns of the dense_gemm tile for which the SM with the most work finishes first.

    The time of a tile is modelled as that of its loads plus that of its stores. Row tiles of the same columns do not
    run in lockstep, so weights that do not stay in L2 may be read again for each row tile: then tiles have as many rows
    as possible.
    """

    def time(tile: tuple[int, int]) -> tuple[int, int]:
        rows, columns = tile
        waves = ceil_div(ceil_div(m, rows) * ceil_div(n, columns), multiprocessors)
        return waves * ((rows + columns) * k // GROUP + rows * columns // DENSE_STORE), -rows

    low, high = DENSE_TILE_ROWS
    row_counts = (low,) if m <= low else (high,) if n * k > L2_BYTES else DENSE_TILE_ROWS
    tiles = itertools.product(row_counts, (width for width in DENSE_TILE_N if width not in DENSE_MANY_ROWS_TILE_N))
    many_rows = itertools.product((high,), DENSE_MANY_ROWS_TILE_N if m > DENSE_ROWS else ())
    return min(itertools.chain(tiles, many_rows), key=time)


def fastest_by_waves(m: int, n: int, k: int, multiprocessors: int) -> DensePlan:
    """Returns the plan of a GEMM of many rows whose waves take the least time; grouped_gemm if K is short.

    With many rows the tensor cores are the bottleneck. A wave of tiles is modelled to take as long as a tile has
    columns, plus a constant, times a factor of the kernel. Tiles of less than 128 columns are not considered: their
    loads take longer than their products.
    """

    def time(row_tiles: int, columns: int, at_once: int) -> int:
        return ceil_div(row_tiles * ceil_div(n, columns), at_once) * (columns + DENSE_WAVE_COLUMNS)

    best = grouped(m, n, Output.BF16, multiprocessors)
    if k < DENSE_WAVE_K:
        return best
    least: float = time(count_row_tiles(m, MANY_ROWS), best.tile_n, multiprocessors)
    row_tiles, clusters = ceil_div(m, MANY_ROWS_TILE), multiprocessors // DENSE_CLUSTER
    pairs = ceil_div(row_tiles, DENSE_CLUSTER)
    for columns in reversed(DENSE_CLUSTER_TILE_N if clusters else ()):  # the widest comes first, and wins a tie
        if (found := DENSE_CLUSTER_COST[columns] * time(pairs, columns, clusters)) < least:
            best, least = many_rows(m, n, columns, multiprocessors), found
    for columns in reversed(DENSE_TILE_N if m <= DENSE_WAVE_ROWS else ()):
        if columns >= GROUP and (found := DENSE_COST * time(row_tiles, columns, multiprocessors)) < least:
            best, least = tiled(m, n, MANY_ROWS_TILE, columns, multiprocessors), found
    return best
