"""Copies of scales to the K-major layout of the GEMMs, in which the rows of each K block are contiguous."""

import torch

from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.scales import Strides, transpose_scales_launch
from fp8moe_plugin.ops import devices
from fp8moe_plugin.ops.devices import Device, prepares

STRIDE_LIMIT = 2**31  # the kernel takes 32 bits
MAX_GROUPS = 65535  # blocks of a CUDA grid along y


def transpose_scales(scales: torch.Tensor, out: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy float32 `[.., rows, K blocks]` to `out` of the same shape, in which the rows of a K block are contiguous.

    Args:
        counts: int32 `[G]` on the device for `[G, rows, K blocks]`, `[1]` for `[rows, K blocks]`; the copy may omit the
            rows of group g from `counts[g]` on.
    """
    device = devices.device_of(out)
    (source_group, row, k), (out_group, _, out_k) = (_strides(tensor) for tensor in (scales, out))
    groups, strides = out.shape[0] if out.dim() == 3 else 1, (source_group, row, out_group, out_k)
    fits = k == 1 and max(strides) < STRIDE_LIMIT and groups <= MAX_GROUPS
    if device is None or not device.backend.has_all_ops or not fits or out.numel() == 0:
        out.copy_(scales)
        return
    run = prepared_transpose(device, groups, *out.shape[-2:], strides)
    run((scales.data_ptr(), counts.data_ptr(), out.data_ptr()))


def _strides(scales: torch.Tensor) -> tuple[int, int, int]:
    """Returns the strides of groups, rows and K blocks.

    A dimension of one element may have any stride, so a fixed one is returned instead.
    """
    group = scales.stride(0) if scales.dim() == 3 and scales.shape[0] > 1 else 0
    row = scales.stride(-2) if scales.shape[-2] > 1 else 0
    return group, row, scales.stride(-1) if scales.shape[-1] > 1 else 1


@prepares("transpose_scales")
def prepared_transpose(device: Device, groups: int, rows: int, k_blocks: int, strides: Strides) -> Prepared:
    """Returns a callable that launches `transpose_scales`, given the addresses of the scales, counts and result."""
    scales, counts, out = map(Slot, range(3))
    sizes = groups, rows, k_blocks, strides, device.multiprocessors
    return device.prepare([transpose_scales_launch(scales, counts, out, *sizes)])
