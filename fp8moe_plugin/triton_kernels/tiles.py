"""Tile tables, as in route.py, of rows that are grouped already. One program writes a table."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel
from fp8moe_plugin.triton_kernels.route import write_tile


@triton.jit
def triton_tiles_of_counts(counts, table, num_tiles, groups, max_m, block_m, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Of `[groups, max_m]` rows, the first `counts[g]` of each group."""
    wait_for_previous_kernel(PDL)
    written = 0
    for first in range(0, groups, BLOCK):
        group = first + tl.arange(0, BLOCK)
        rows = tl.minimum(tl.maximum(tl.load(counts + group, group < groups, 0), 0), max_m)
        tiles = (rows + block_m - 1) // block_m
        first_tile = written + tl.cumsum(tiles, 0) - tiles
        for i in range(0, tl.max(tiles, 0)):
            begin, end = group * max_m + i * block_m, group * max_m + tl.minimum((i + 1) * block_m, rows)
            write_tile(table, first_tile + i, group, begin, end, i < tiles)
        written += tl.sum(tiles, 0)
    tl.store(num_tiles, written)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def triton_tiles_of_indices(ids, table, num_tiles, rows, num_groups, block_m, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Of the runs of equal ids in int32 `[rows]`; those outside `[0, num_groups)` make no tile."""
    wait_for_previous_kernel(PDL)
    written, run = 0, 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        group = tl.load(ids + row, row < rows, -1)
        begins = group != tl.load(ids + row - 1, (row > 0) & (row < rows), -1)
        begin = tl.associative_scan(tl.where(begins, row, run), 0, larger)  # of the row's run
        run = tl.max(begin, 0)
        within, inside = (row - begin) % block_m, (group >= 0) & (group < num_groups)
        opens = inside & (within == 0)
        entry = table + 4 * (written + tl.cumsum(opens.to(tl.int32), 0) - 1)
        tl.store(entry, group, opens)
        tl.store(entry + 1, row, opens)
        ends = group != tl.load(ids + row + 1, row + 1 < rows, -1)
        tl.store(entry + 2, row + 1, inside & (ends | (within == block_m - 1)))
        written += tl.sum(opens.to(tl.int32), 0)
    tl.store(num_tiles, written)
