"""A copy of scales in which the rows of each K block are contiguous, as the GEMMs read them."""

import torch

from fp8moe_plugin.checkpoint.shapes import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch, Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.plan.catalog import transpose_scales_key
from fp8moe_plugin.plan.constants import SCALE_TILE_K, SCALE_TILE_ROWS
from fp8moe_plugin.plan.triton_catalog import is_triton

STRIDE_LIMIT = 2**31  # the kernel takes 32 bits
MAX_GROUPS = 65535  # blocks of a CUDA grid along y
BLOCKS_PER_MULTIPROCESSOR = 8  # some more than run at once

Strides = tuple[int, int, int, int]  # of groups and rows in, of groups and K blocks out; in elements


def transpose_scales(scales: torch.Tensor, out: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy float32 `[.., rows, K blocks]` to `out` of the same shape, of which rows are contiguous.

    Args:
        counts: int32 `[G]` on the device for `[G, rows, K blocks]`, `[1]` for `[rows, K blocks]`; rows of group g from
            `counts[g]` on may be left out.
    """
    device = backend.device_of(out)
    (source_group, row, k), (out_group, _, out_k) = (_strides(tensor) for tensor in (scales, out))
    groups, strides = out.shape[0] if out.dim() == 3 else 1, (source_group, row, out_group, out_k)
    fits = k == 1 and max(strides) < STRIDE_LIMIT and groups <= MAX_GROUPS
    if device is None or is_triton(device.target) or not fits or out.numel() == 0:
        out.copy_(scales)
        return
    run = prepared_transpose(device, groups, *out.shape[-2:], strides)
    run((scales.data_ptr(), counts.data_ptr(), out.data_ptr()))


def _strides(scales: torch.Tensor) -> tuple[int, int, int]:
    """Those of groups, rows and K blocks; of a dimension of one element, which may have any, as if it were dense."""
    group = scales.stride(0) if scales.dim() == 3 and scales.shape[0] > 1 else 0
    row = scales.stride(-2) if scales.shape[-2] > 1 else 0
    return group, row, scales.stride(-1) if scales.shape[-1] > 1 else 1


@prepares("transpose_scales")
def prepared_transpose(device: Device, groups: int, rows: int, k_blocks: int, strides: Strides) -> Prepared:
    """What launches `transpose_scales`, given the addresses of the scales, the counts and the result."""
    scales, counts, out = map(Slot, range(3))
    return device.prepare([transpose_scales_launch(device, scales, counts, out, groups, rows, k_blocks, strides)])


def transpose_scales_launch(
    device: Device,
    scales: Address,
    counts: Address,
    out: Address,
    groups: int,
    rows: int,
    k_blocks: int,
    strides: Strides,
) -> Launch:
    key, k_tiles = transpose_scales_key(), ceil_div(k_blocks, SCALE_TILE_K)
    at_once = ceil_div(device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR, groups * k_tiles)
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
