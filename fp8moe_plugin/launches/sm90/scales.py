"""The launch that copies scales to the layout that the GEMMs read."""

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.plan.sm90.catalog import transpose_scales_key
from fp8moe_plugin.plan.sm90.constants import SCALE_TILE_K, SCALE_TILE_ROWS

BLOCKS_PER_MULTIPROCESSOR = 8  # slightly more than are resident at once

Strides = tuple[int, int, int, int]  # of groups and rows in, of groups and K blocks out; in elements


def transpose_scales_launch(
    scales: Address,
    counts: Address,
    out: Address,
    groups: int,
    rows: int,
    k_blocks: int,
    strides: Strides,
    multiprocessors: int,
) -> Launch:
    """Returns the launch that copies the first `counts[g]` rows of each group of float32 `[groups, rows, k_blocks]`."""
    key, k_tiles = transpose_scales_key(), ceil_div(k_blocks, SCALE_TILE_K)
    at_once = ceil_div(multiprocessors * BLOCKS_PER_MULTIPROCESSOR, groups * k_tiles)
    group_stride, row_stride, out_group_stride, out_k_stride = strides
    return Launch(
        key,
        (k_tiles * min(ceil_div(rows, SCALE_TILE_ROWS), at_once), groups),
        key.arguments(
            scales=scales,
            counts=counts,
            out=out,
            group_stride=group_stride,
            row_stride=row_stride,
            out_group_stride=out_group_stride,
            out_k_stride=out_k_stride,
            rows=rows,
            k_blocks=k_blocks,
        ),
    )
