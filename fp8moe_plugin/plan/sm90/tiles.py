"""The division of rows into tiles, and of (token, expert) pairs into chunks."""

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.sm90.constants import FEW_ROWS_TILE, MANY_ROWS_TILE, PAIRS_PER_CHUNK, TAIL_ROWS

# The kernels multiply this many rows at once: a tile is padded to one of these sizes.
_PADDED_ROWS = {FEW_ROWS_TILE: (8, 16, 32, 64), MANY_ROWS_TILE: (64, 128, MANY_ROWS_TILE + TAIL_ROWS)}


def row_tiles(rows: int, tile_rows: int) -> list[int]:
    """Returns the rows of each tile of an expert with `rows` rows, as in csrc/pipeline/tile_table.cuh."""
    full, rest = divmod(rows, tile_rows)
    if count_row_tiles(rows, tile_rows) > full:
        return [tile_rows] * full + [rest]
    return [tile_rows + min(TAIL_ROWS, max(0, rest - tile * TAIL_ROWS)) for tile in range(full)]


def count_row_tiles(rows: int, tile_rows: int) -> int:
    """Returns the number of tiles of an expert with `rows` rows."""
    full, rest = divmod(rows, tile_rows)
    tails = full * TAIL_ROWS if tile_rows == MANY_ROWS_TILE else 0
    return full + (rest > tails)


def computed_rows(rows: int, tile_rows: int) -> int:
    """Returns how many rows, including padding, the kernels multiply for an expert with `rows` rows."""
    padded = _PADDED_ROWS[tile_rows]
    return sum(min(size for size in padded if size >= tile) for tile in row_tiles(rows, tile_rows))


def route_chunks(pairs: int) -> int:
    """Returns the number of chunks into which route divides (token, expert) pairs.

    With more than one chunk, count_experts runs before route.
    """
    return max(1, ceil_div(pairs, PAIRS_PER_CHUNK))
