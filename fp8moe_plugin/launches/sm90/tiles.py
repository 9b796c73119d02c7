"""Tile tables, and the launches that build them from counts, ends or indices of groups.

A tile table is int32 `[capacity, 4]` with one entry `(expert, row_begin, row_end, first)` for each row tile. The rows
are those of the tile's whole expert, and `first` is the index of that expert's first tile: entry i is tile `i - first`
of its expert, as `plan.sm90.tiles.row_tiles` cuts it. Only the first `num_tiles[0]` entries are written.
`num_tiles[1:5]` are two pairs of counters with which GEMMs claim tiles; they are zero before and after each GEMM.

`done_counters`, int32 `[1 + capacity * n]`, lets GEMM 2 of the experts start before GEMM 1 ends: it holds the number of
finished blocks of GEMM 1, then n counters for each row tile (`plan.sm90.scratch.row_counters`). The first of them
counts stored columns. In tiles for many rows each of two math warpgroups counts for itself. Whatever writes
the table zeroes `done_counters`, so a table is valid for one launch of GEMM 1.
"""

from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import N_MULTIPLE
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.plan.sm90.catalog import tiles_of_counts_key, tiles_of_ends_key, tiles_of_indices_key


class Tiles(NamedTuple):
    """The addresses of a tile table, see the module's docstring; without a table (0) a GEMM is dense."""

    table: Address = 0
    num_tiles: Address = 0
    done_counters: Address = 0  # 0: GEMM 2 of the experts waits for the end of GEMM 1


def tiles_of_counts_launch(counts: Address, groups: int, max_m: int, tiles: Tiles, cut: int) -> Launch:
    """Returns the launch that writes tiles of the first `counts[g]` rows of each group of `[groups, max_m]` rows.

    `counts` is the address of int32 `[groups]`, which are clamped to `[0, max_m]`.
    """
    key = tiles_of_counts_key()
    return Launch(
        key,
        1,
        key.arguments(
            counts=counts,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            done_counters=tiles.done_counters,
            groups=groups,
            max_m=max_m,
            block_m=cut,
        ),
        pdl=True,
    )


def tiles_of_ends_launch(ends: Address, groups: int, rows: int, alignment: int, tiles: Tiles, cut: int) -> Launch:
    """Returns the launch that writes tiles of `rows` rows; the rows of group g end at `ends[g]`.

    `ends` is the address of int32 `[groups]`; a group begins at the next multiple of `alignment`.
    """
    key = tiles_of_ends_key()
    return Launch(
        key,
        1,
        key.arguments(
            ends=ends,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            done_counters=tiles.done_counters,
            groups=groups,
            rows=rows,
            alignment=alignment,
            block_m=cut,
        ),
        pdl=True,
    )


def tiles_of_indices_launch(
    blocks: int,
    indices: Address,
    rows: int,
    groups: int,
    run_begins: Address,
    tiles: Tiles,
    cut: int,
    out: Address,
    n: int,
) -> Launch:
    """Returns the launch that writes a tile for each run of equal ids in int32 `[rows]` at `indices`.

    Ids outside `[0, groups)` get no tile; their rows in bfloat16 `[rows, n]` at `out` become zeros. `run_begins` is the
    address of int32 `[rows]` scratch.
    """
    key = tiles_of_indices_key()
    return Launch(
        key,
        max(2, blocks),
        key.arguments(
            ids=indices,
            run_begins=run_begins,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            d=out,
            rows=rows,
            num_groups=groups,
            block_m=cut,
            chunks=n // N_MULTIPLE,
        ),
        pdl=True,
    )
