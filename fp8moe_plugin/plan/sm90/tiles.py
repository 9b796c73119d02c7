"""The division of rows into tiles, and of (token, expert) pairs into chunks."""

from typing import NamedTuple

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.sm90.constants import (
    FEW_ROWS_TILE,
    MANY_ROWS_TILE,
    PAIRS_PER_CHUNK,
    TAIL_ROWS,
    WIDE_FEW_ROWS_TILE,
)


class RowTile(NamedTuple):
    """The tiles of a family of kernels. csrc/pipeline/tile_table.cuh has a case for each number of rows."""

    rows: int  # per tile, without the tail
    tail_rows: int  # most rows of a tail
    padded: tuple[int, ...]  # the kernels multiply this many rows at once: a tile is padded to one of these sizes
    streams_weights: bool  # the kernels are those for few rows per expert, which stream the weights
    blocks: int = 1  # of a cluster, which share a tile

    def grid(self, multiprocessors: int) -> int:
        """Returns the blocks of a kernel that has one on each SM, in whole clusters."""
        return max(multiprocessors // self.blocks, 1) * self.blocks


FEW_ROWS = RowTile(FEW_ROWS_TILE, 0, (8, 16, 32, 64), streams_weights=True)
PACKED_FEW_ROWS = FEW_ROWS._replace(padded=(8, 16, 24, 32, 40, 48, 64))  # of kernels that decode weights
# The same for experts with more rows than such a tile.
PACKED_WIDE = RowTile(WIDE_FEW_ROWS_TILE, 0, (16, 32, 48, 64, 80, 96, 112, WIDE_FEW_ROWS_TILE), streams_weights=True)
MANY_ROWS = RowTile(MANY_ROWS_TILE, TAIL_ROWS, (64, 128, MANY_ROWS_TILE + TAIL_ROWS), streams_weights=False)
# Of kernels for many rows that decode weights, in clusters of two blocks (csrc/pipeline/shared_tiles.cuh).
SHARED = RowTile(2 * MANY_ROWS_TILE, 0, (64, 128, 192, 256), streams_weights=False, blocks=2)


def row_tiles(rows: int, tile: RowTile) -> list[int]:
    """Returns the rows of each tile of an expert with `rows` rows, as in csrc/pipeline/tile_table.cuh."""
    full, rest = divmod(rows, tile.rows)
    if count_row_tiles(rows, tile) > full:
        return [tile.rows] * full + [rest]
    return [tile.rows + min(tile.tail_rows, max(0, rest - i * tile.tail_rows)) for i in range(full)]


def count_row_tiles(rows: int, tile: RowTile) -> int:
    """Returns the number of tiles of an expert with `rows` rows."""
    full, rest = divmod(rows, tile.rows)
    return full + (rest > full * tile.tail_rows)


def computed_rows(rows: int, tile: RowTile) -> int:
    """Returns how many rows, including padding, the kernels multiply for an expert with `rows` rows."""
    return sum(min(size for size in tile.padded if size >= part) for part in row_tiles(rows, tile))


def route_chunks(pairs: int) -> int:
    """Returns the number of chunks into which route divides (token, expert) pairs.

    With more than one chunk, count_experts runs before route.
    """
    return max(1, ceil_div(pairs, PAIRS_PER_CHUNK))
