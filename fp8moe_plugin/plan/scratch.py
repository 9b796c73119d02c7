"""Layout of scratch memory, shared by all backends: pieces of one allocation, tile tables, K-major scales."""

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div

PIECE = 256  # bytes; the alignment of pieces


def offsets(*sizes: int) -> Iterable[int]:
    """Returns the offsets of consecutive pieces of these sizes, and the end of the last piece."""
    return itertools.accumulate((ceil_div(size, PIECE) * PIECE for size in sizes), initial=0)


def tile_capacity(rows: int, groups: int, tile_rows: int) -> int:
    """Returns the maximum number of row tiles of `rows` rows in at most `groups` groups; at least 1."""
    return max(1, min(rows, rows // tile_rows + groups))


def scale_pitch(rows: int) -> int:
    """Returns the stride between K blocks of K-major scales, in elements: a multiple of 16 bytes."""
    return ceil_div(rows, 4) * 4


class QuantizedScratch(NamedTuple):
    """Scratch memory of a dense layer."""

    values: int  # e4m3 [M, K]
    scales: int  # float32, of the values, K-major
    nbytes: int


@functools.lru_cache(maxsize=4096)
def quantized_scratch(rows: int, k: int) -> QuantizedScratch:
    return QuantizedScratch(*offsets(rows * k, 4 * scale_pitch(rows) * (k // GROUP)))
