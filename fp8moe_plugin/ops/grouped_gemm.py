"""Grouped block-scaled FP8 GEMMs: rows of many experts, each against its own weights."""

from collections.abc import Callable

import torch

from fp8moe_plugin.jit.launch import Address, Launch, Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference, workspace
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import (
    check_activations,
    check_int,
    check_shape,
    check_tensor,
    check_values,
    check_weights,
)
from fp8moe_plugin.ops.gemm_launches import grouped_launch
from fp8moe_plugin.ops.operands import Quantized, Rows, Tiles, Weights, k_major, placed
from fp8moe_plugin.ops.route import tiles_of_counts_launch, tiles_of_indices_launch
from fp8moe_plugin.plan import GroupedPlan, plan_contiguous, plan_masked


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized, b: Quantized, out: torch.Tensor, m_indices: torch.Tensor
) -> torch.Tensor:
    """`out[i] = a[i] @ b[m_indices[i]].T` for rows that come expert by expert; no alignment of the groups is needed.

    Args:
        a: e4m3 `[M, K]` and float32 scales `[M, K/128]` of any strides; K-major ones, as `per_token_group_quant_fp8`
            returns them, are read in place, others are copied first. K a multiple of 128.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), K/128]`; N a multiple of 8.
        out: bfloat16 `[M, N]`; rows with an index outside `[0, G)` are not written.
        m_indices: int32 `[M]` on the device; -1 skips the row. Each run of equal ids is tiled by itself.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_activations("a", a, dims=2)
    m, k = a[0].shape
    check_weights("b", b, 3, k, a[0].device)
    groups, n = b[0].shape[:2]
    check_tensor("out", out, dtype=torch.bfloat16, shape=(m, n), device=a[0].device)
    check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(m,), device=a[0].device)
    check_values("m_indices", m_indices, -1, groups - 1)
    if m == 0:
        return out
    device = backend.device_of(out)
    if device is None:
        reference.contiguous_gemm(a, b, out, m_indices)
        return out
    plan, (scales, *strides) = plan_contiguous(m), k_major(*a)
    run = prepared_grouped(device, plan, contiguous_launches, m, groups, n, k, *strides)
    scratch = workspace.scratch(plan.scratch.nbytes, out)
    run(tuple(tensor.data_ptr() for tensor in (a[0], scales, *b, out, m_indices, scratch)))
    return out


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized, b: Quantized, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> torch.Tensor:
    """`out[g, i] = a[g, i] @ b[g].T` for `i < masked_m[g]`. The counts stay on the device: captures in a CUDA graph.

    Args:
        a: e4m3 `[G, max_m, K]` and float32 scales `[G, max_m, K/128]` of any strides, as for the contiguous layout; K a
            multiple of 128.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), K/128]`; N a multiple of 8.
        out: bfloat16 `[G, max_m, N]`; rows from `masked_m[g]` on are not written.
        masked_m: int32 `[G]` on the device; counts are clamped to `[0, max_m]`.
        expected_m: rows per group on average, as far as the host knows; may change the speed, never the result.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_activations("a", a, dims=3)
    groups, max_m, k = a[0].shape
    check_weights("b", b, 3, k, a[0].device)
    check_shape("b", b[0], (groups, None, k))
    n = b[0].shape[1]
    check_tensor("out", out, dtype=torch.bfloat16, shape=(groups, max_m, n), device=a[0].device)
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(groups,), device=a[0].device)
    check_values("masked_m", masked_m, 0, max_m)
    check_int("expected_m", expected_m)
    if groups * max_m == 0:
        return out
    device = backend.device_of(out)
    if device is None:
        reference.masked_gemm(a, b, out, masked_m)
        return out
    plan, (scales, *strides) = plan_masked(groups, max_m, n, k, expected_m), k_major(*a)
    run = prepared_grouped(device, plan, masked_launches, groups * max_m, groups, n, k, *strides)
    scratch = workspace.scratch(plan.scratch.nbytes, out)
    run(tuple(tensor.data_ptr() for tensor in (a[0], scales, *b, out, masked_m, scratch)))
    return out


@prepares("m_grouped_fp8_gemm_nt")
def prepared_grouped(
    device: Device,
    plan: GroupedPlan,
    launches: Callable[..., list[Launch]],
    rows: int,
    groups: int,
    n: int,
    k: int,
    scale_group: int,
    scale_k_block: int,
) -> Prepared:
    """What launches a grouped GEMM, given the addresses in the op; strides are those of `k_major`.

    `launches` is `contiguous_launches` or `masked_launches`.
    """
    a, a_scales, b, b_scales, out, counts_or_indices, scratch = map(Slot, range(7))
    operands = Rows(a, rows, k, a_scales, scale_group, scale_k_block), Weights(b, groups, n, k, b_scales)
    return device.prepare(launches(device, plan, *operands, out, counts_or_indices, scratch))


def contiguous_launches(
    device: Device, plan: GroupedPlan, a: Rows, b: Weights, out: Address, m_indices: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `m_grouped_fp8_gemm_nt_contiguous`."""
    at = placed(plan.scratch, scratch)
    tiles = Tiles(at.table, at.num_tiles)
    return [
        tiles_of_indices_launch(m_indices, a.rows, b.experts, at.run_begins, tiles, plan.tile_rows),
        grouped_launch(device, plan, a, b, out, tiles),
    ]


def masked_launches(
    device: Device, plan: GroupedPlan, a: Rows, b: Weights, out: Address, masked_m: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `m_grouped_fp8_gemm_nt_masked`."""
    at = placed(plan.scratch, scratch)
    tiles = Tiles(at.table, at.num_tiles, at.done_counters)
    return [
        tiles_of_counts_launch(masked_m, b.experts, a.rows // b.experts, tiles, plan.tile_rows),
        grouped_launch(device, plan, a, b, out, tiles),
    ]
