"""Grouped block-scaled FP8 GEMMs: the rows of each expert are multiplied by the expert's weights."""

import functools
from collections.abc import Callable

import torch

from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.operands import Extent, Rows, Weights
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.checks import (
    CheckedOnce,
    check_ascending,
    check_shape,
    check_tensor,
    check_values,
    check_writable,
    two_parts,
)
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.gemm_checks import check_blocks, check_out, check_out_apart, check_rows
from fp8moe_plugin.ops.operands import Quantized, in_rows, k_major, whole_k_blocks
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.plan.spec import GroupedBy, Grouping

BY_INDICES, BY_COUNTS = Grouping(GroupedBy.INDICES), Grouping(GroupedBy.COUNTS)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized, b: Quantized, out: torch.Tensor, m_indices: torch.Tensor
) -> torch.Tensor:
    """`out[i] = a[i] @ b[m_indices[i]].T` for rows that come expert by expert; no alignment of the groups is needed.

    Args:
        a: e4m3 `[M, K]` and float32 scales `[M, ceil(K/128)]`; K a multiple of 16. `fp8_gemm_nt` says which layouts of
            values are read in place; scales are if they are K-major, as `per_token_group_quant_fp8` returns them.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), ceil(K/128)]`; N a multiple of 8.
        out: bfloat16 `[M, N]`; rows with an index outside `[0, G)` become zeros.
        m_indices: int32 `[M]` on the device; -1 for rows of no group. Each run of equal ids has tiles of its own.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_flat(*a, *b, out)
    m, groups = len(out), len(b[0])
    check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(m,), device=out.device)
    check_values("m_indices", m_indices, -1, groups - 1)
    if m:
        _multiply(BY_INDICES, m, 0, a, b, out, m_indices, reference.contiguous_gemm)
    return out


def m_grouped_fp8_gemm_nt_psum(
    a: Quantized, b: Quantized, out: torch.Tensor, ends: torch.Tensor, expected_m: int, alignment: int = 128
) -> torch.Tensor:
    """`out[i] = a[i] @ b[g].T` for the rows i of group g, which end at `ends[g]` (DeepGEMM's psum layout).

    Captures in a CUDA graph.

    Args:
        a: e4m3 `[M, K]` and its scales, as for `m_grouped_fp8_gemm_nt_contiguous`.
        b: e4m3 `[G, N, K]` and its scales, as for `m_grouped_fp8_gemm_nt_contiguous`.
        out: bfloat16 `[M, N]`; rows of no group are not written.
        ends: int32 `[G]` on the device, not descending, 0 to M. Group 0 begins at row 0. Any other group begins at the
            end of the preceding group, rounded up to a multiple of `alignment`; an empty group ends where it begins.
        expected_m: estimate of the rows per group; may change the speed, never the result.
        alignment: 1 or more.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_flat(*a, *b, out)
    m, groups = len(out), len(b[0])
    check_tensor("ends", ends, dtype=torch.int32, shape=(groups,), device=out.device)
    check_values("ends", ends, 0, m)
    check_ascending("ends", ends)
    check_int("expected_m", expected_m)
    check_int("alignment", alignment)
    if alignment < 1:
        raise InvalidInputError(f"alignment is {alignment}, needs 1 or more. Pass the distance that groups keep.")
    if m:
        by_ends, rows = Grouping(GroupedBy.ENDS, alignment), groups * ceil_div(m, groups)
        compute = functools.partial(reference.psum_gemm, alignment)
        _multiply(by_ends, rows, expected_m, a, b, out, ends, compute, ends[-1:])
    return out


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized, b: Quantized, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> torch.Tensor:
    """`out[g, i] = a[g, i] @ b[g].T` for `i < masked_m[g]`. The counts stay on the device: captures in a CUDA graph.

    Args:
        a: e4m3 `[G, max_m, K]` and float32 scales `[G, max_m, ceil(K/128)]`, as for the contiguous layout.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), ceil(K/128)]`; N a multiple of 8.
        out: bfloat16 `[G, max_m, N]`; rows from `masked_m[g]` on are not written.
        masked_m: int32 `[G]` on the device; counts are clamped to `[0, max_m]`.
        expected_m: estimate of the rows per group; may change the speed, never the result.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_masked(*a, *b, out)
    groups, max_m, _ = out.shape
    check_shape("b", b[0], (groups, None, None))
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(groups,), device=out.device)
    check_values("masked_m", masked_m, 0, max_m)
    check_int("expected_m", expected_m)
    if groups * max_m:
        _multiply(BY_COUNTS, groups * max_m, expected_m, a, b, out, masked_m, reference.masked_gemm, masked_m)
    return out


def _check(
    dims: int, a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise `InvalidInputError` unless these are valid operands for an A with `dims` dimensions."""
    check_rows("a", a, a_scales, dims)
    check_blocks("b", b, b_scales, 3, a.shape[-1], a.device)
    check_out("out", out, (*a.shape[:-1], b.shape[1]), torch.bfloat16, a.device)
    check_writable("out", out)


_check_flat = CheckedOnce(functools.partial(_check, 2))
_check_masked = CheckedOnce(functools.partial(_check, 3))


def _multiply(
    grouping: Grouping,
    planned_rows: int,
    expected_m: int,
    a: Quantized,
    b: Quantized,
    out: torch.Tensor,
    layout: torch.Tensor,
    compute: Callable[[Quantized, Quantized, torch.Tensor, torch.Tensor], None],
    counts: torch.Tensor | None = None,
) -> None:
    """Run the kernels on the device of `out`, or call `compute` if the reference computes it.

    Args:
        planned_rows: rows of all groups if each has the maximum number of rows.
        layout: the tensor that `grouping` names.
        counts: number of rows of A with a result: one for each group of `[G, max_m, K]`, a single one for `[M, K]`;
            or None.
    """
    check_out_apart(out, a, b)
    device = devices.device_of(out)
    if device is None:
        return compute(a, b, out, layout)
    backend = device.backend
    if grouping.kind is GroupedBy.ENDS and not backend.has_all_ops:
        raise UnsupportedError(devices.NO_TRITON_KERNEL.format("m_grouped_fp8_gemm_nt_psum"))
    (groups, n), k = b[0].shape[:2], ceil_div(a[0].shape[-1], GROUP) * GROUP
    plan = backend.plan_grouped(grouping, planned_rows, groups, n, k, expected_m, device.multiprocessors)
    if not backend.reads_partial_k_blocks:
        a, b = (whole_k_blocks(a[0]), a[1]), (whole_k_blocks(b[0]), b[1])
    if grouping.kind is GroupedBy.INDICES and not backend.zeroes_ungrouped_rows:
        out.zero_()
    product = out.contiguous()  # copies a strided `out`, with the rows that the kernels do not write
    (rows, extent), (weights, weights_extent) = in_rows(a[0]), in_rows(b[0])
    scales, *strides = k_major(*a, counts)
    run = prepared_grouped(device, plan, out.numel() // n, groups, n, k, extent, weights_extent, *strides)
    scratch = workspace.scratch(plan.scratch, out)
    tensors = rows, scales, weights, b[1].contiguous(), product, layout, scratch
    run(tuple(tensor.data_ptr() for tensor in tensors))
    if product is not out:
        out.copy_(product)


@prepares("m_grouped_fp8_gemm_nt")
def prepared_grouped(
    device: Device,
    plan: Plan,
    rows: int,
    groups: int,
    n: int,
    k: int,
    a_extent: Extent,
    b_extent: Extent,
    scale_group: int,
    scale_k_block: int,
) -> Prepared:
    """Returns a callable that launches a grouped GEMM, given addresses; `k_major` returns the strides."""
    a, a_scales, b, b_scales, out, layout, scratch = map(Slot, range(7))
    operands = (
        Rows(a, rows, k, a_scales, scale_group, scale_k_block, a_extent),
        Weights(b, groups, n, k, b_scales, b_extent),
    )
    return device.prepare(plan.launches(*operands, out, layout, scratch))
