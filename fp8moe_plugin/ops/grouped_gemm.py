"""Grouped block-scaled FP8 GEMMs: rows of many experts, each against its own weights."""

import functools
from collections.abc import Callable

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP, ceil_div
from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.jit.launch import Address, Launch, Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference, workspace
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import (
    CheckedOnce,
    check_ascending,
    check_shape,
    check_tensor,
    check_values,
    check_writable,
    two_parts,
)
from fp8moe_plugin.ops.gemm_checks import check_blocks, check_out, check_out_apart, check_rows
from fp8moe_plugin.ops.gemm_launches import grouped_launch
from fp8moe_plugin.ops.operands import Extent, Quantized, Rows, Tiles, Weights, in_rows, k_major, placed, whole_k_blocks
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.ops.route import tiles_of_counts_launch, tiles_of_ends_launch, tiles_of_indices_launch
from fp8moe_plugin.ops.triton_layers import triton_contiguous_launches, triton_masked_launches
from fp8moe_plugin.plan import GroupedPlan, plan_contiguous, plan_masked
from fp8moe_plugin.plan.triton_catalog import is_triton
from fp8moe_plugin.plan.triton_step import TritonGrouped, plan_triton_contiguous, plan_triton_masked

AnyPlan = GroupedPlan | TritonGrouped
Plan = Callable[[Device], AnyPlan]
Launches = Callable[[Device, AnyPlan, Rows, Weights, Address, Address, Address], list[Launch]]


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized, b: Quantized, out: torch.Tensor, m_indices: torch.Tensor
) -> torch.Tensor:
    """`out[i] = a[i] @ b[m_indices[i]].T` for rows that come expert by expert; no alignment of the groups is needed.

    Args:
        a: e4m3 `[M, K]` and float32 scales `[M, ceil(K/128)]`; K a multiple of 16. Which layouts are read in place:
            see `fp8_gemm_nt`; of scales those that are K-major, as `per_token_group_quant_fp8` returns them.
        b: e4m3 `[G, N, K]` and float32 scales `[G, ceil(N/128), ceil(K/128)]`; N a multiple of 8.
        out: bfloat16 `[M, N]`; rows with an index outside `[0, G)` become zeros.
        m_indices: int32 `[M]` on the device; -1 for rows of no group. Each run of equal ids is tiled by itself.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_flat(*a, *b, out)
    m, groups = len(out), len(b[0])
    check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(m,), device=out.device)
    check_values("m_indices", m_indices, -1, groups - 1)
    if m:
        plan = functools.partial(_plan_contiguous, m)
        _multiply(plan, contiguous_launches, a, b, out, m_indices, reference.contiguous_gemm)
    return out


def m_grouped_fp8_gemm_nt_psum(
    a: Quantized, b: Quantized, out: torch.Tensor, ends: torch.Tensor, expected_m: int, alignment: int = 128
) -> torch.Tensor:
    """`out[i] = a[i] @ b[g].T` for the rows i of group g, which are those up to `ends[g]` (DeepGEMM's psum layout).

    Captures in a CUDA graph.

    Args:
        a: e4m3 `[M, K]` and its scales, as for `m_grouped_fp8_gemm_nt_contiguous`.
        b: e4m3 `[G, N, K]` and its scales, likewise.
        out: bfloat16 `[M, N]`; rows of no group are not written.
        ends: int32 `[G]` on the device, not descending, 0 to M. Group 0 begins at row 0, any other at the next multiple
            of `alignment` behind the end of the group before it; an empty group ends there.
        expected_m: rows per group on average, as far as the host knows; may change the speed, never the result.
        alignment: 1 or more.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_flat(*a, *b, out)
    (m, n), groups = out.shape, len(b[0])
    check_tensor("ends", ends, dtype=torch.int32, shape=(groups,), device=out.device)
    check_values("ends", ends, 0, m)
    check_ascending("ends", ends)
    check_int("expected_m", expected_m)
    check_int("alignment", alignment)
    if alignment < 1:
        raise InvalidInputError(f"alignment is {alignment}, needs 1 or more. Pass the distance that groups keep.")
    if m:
        plan = functools.partial(_plan_psum, groups, ceil_div(m, groups), n, _padded_k(a), expected_m)
        compute = functools.partial(reference.psum_gemm, alignment)
        _multiply(plan, psum_launches(alignment), a, b, out, ends, compute, ends[-1:])
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
        expected_m: rows per group on average, as far as the host knows; may change the speed, never the result.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_masked(*a, *b, out)
    groups, max_m, n = out.shape
    check_shape("b", b[0], (groups, None, None))
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(groups,), device=out.device)
    check_values("masked_m", masked_m, 0, max_m)
    check_int("expected_m", expected_m)
    if groups * max_m:
        plan = functools.partial(_plan_masked, groups, max_m, n, _padded_k(a), expected_m)
        _multiply(plan, masked_launches, a, b, out, masked_m, reference.masked_gemm, masked_m)
    return out


def _check(
    dims: int, a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise `InvalidInputError` unless a grouped GEMM of A in so many dimensions takes these."""
    check_rows("a", a, a_scales, dims)
    check_blocks("b", b, b_scales, 3, a.shape[-1], a.device)
    check_out("out", out, (*a.shape[:-1], b.shape[1]), torch.bfloat16, a.device)
    check_writable("out", out)


_check_flat = CheckedOnce(functools.partial(_check, 2))
_check_masked = CheckedOnce(functools.partial(_check, 3))


def _padded_k(a: Quantized) -> int:
    return ceil_div(a[0].shape[-1], GROUP) * GROUP


def _plan_contiguous(m: int, device: Device) -> AnyPlan:
    return plan_triton_contiguous(device.target, m) if is_triton(device.target) else plan_contiguous(m)


def _plan_masked(groups: int, max_m: int, n: int, k: int, expected_m: int, device: Device) -> AnyPlan:
    if is_triton(device.target):
        return plan_triton_masked(device.target, groups, max_m, expected_m)
    return plan_masked(groups, max_m, n, k, expected_m)


def _plan_psum(groups: int, max_m: int, n: int, k: int, expected_m: int, device: Device) -> AnyPlan:
    if is_triton(device.target):
        raise UnsupportedError(backend.NO_TRITON_KERNEL.format("m_grouped_fp8_gemm_nt_psum"))
    return plan_masked(groups, max_m, n, k, expected_m)


def _multiply(
    plan_of: Plan,
    launches: Launches,
    a: Quantized,
    b: Quantized,
    out: torch.Tensor,
    layout: torch.Tensor,
    compute: Callable[[Quantized, Quantized, torch.Tensor, torch.Tensor], None],
    counts: torch.Tensor | None = None,
) -> None:
    """Run the launches on the device of `out`, or `compute` where the reference serves it.

    `layout` holds the group of each row, or the number or the end of each group's rows. Rows of A from `counts` on have
    no result: one count for each group of `[G, max_m, K]`, one for `[M, K]`, or None.
    """
    check_out_apart(out, a, b)
    device = backend.device_of(out)
    if device is None:
        return compute(a, b, out, layout)
    plan = plan_of(device)
    if isinstance(plan, TritonGrouped):
        a, b = (whole_k_blocks(a[0]), a[1]), (whole_k_blocks(b[0]), b[1])
    if isinstance(plan, TritonGrouped) and launches is contiguous_launches:
        out.zero_()  # rows of no group
    product = out.contiguous()  # a copy of a strided one keeps the rows that are not written
    (rows, extent), (weights, weights_extent) = in_rows(a[0]), in_rows(b[0])
    scales, *strides = k_major(*a, counts)
    groups, n = b[0].shape[:2]
    sizes = out.numel() // n, groups, n, _padded_k(a)
    run = prepared_grouped(device, plan, launches, *sizes, extent, weights_extent, *strides)
    scratch = workspace.scratch(plan.scratch.nbytes, out)
    tensors = rows, scales, weights, b[1].contiguous(), product, layout, scratch
    run(tuple(tensor.data_ptr() for tensor in tensors))
    if product is not out:
        out.copy_(product)


@prepares("m_grouped_fp8_gemm_nt")
def prepared_grouped(
    device: Device,
    plan: AnyPlan,
    launches: Launches,
    rows: int,
    groups: int,
    n: int,
    k: int,
    a_extent: Extent,
    b_extent: Extent,
    scale_group: int,
    scale_k_block: int,
) -> Prepared:
    """What launches a grouped GEMM, given the addresses in `_multiply`; strides are those of `k_major`.

    `launches` is `contiguous_launches`, `masked_launches`, or a result of `psum_launches`.
    """
    a, a_scales, b, b_scales, out, layout, scratch = map(Slot, range(7))
    operands = (
        Rows(a, rows, k, a_scales, scale_group, scale_k_block, a_extent),
        Weights(b, groups, n, k, b_scales, b_extent),
    )
    return device.prepare(launches(device, plan, *operands, out, layout, scratch))


def contiguous_launches(
    device: Device, plan: AnyPlan, a: Rows, b: Weights, out: Address, m_indices: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `m_grouped_fp8_gemm_nt_contiguous`."""
    if isinstance(plan, TritonGrouped):
        return triton_contiguous_launches(plan, a, b, out, m_indices, scratch)
    at = placed(plan.scratch, scratch)
    tiles = Tiles(at.table, at.num_tiles)
    indices = tiles_of_indices_launch(
        device, m_indices, a.rows, b.experts, at.run_begins, tiles, plan.tile_rows, out, b.n
    )
    return [indices, grouped_launch(device, plan, a, b, out, tiles)]


@functools.cache
def psum_launches(alignment: int) -> Launches:
    """The kernels of `m_grouped_fp8_gemm_nt_psum`, as a function like `contiguous_launches`."""

    def launches(
        device: Device, plan: AnyPlan, a: Rows, b: Weights, out: Address, ends: Address, scratch: Address
    ) -> list[Launch]:
        assert isinstance(plan, GroupedPlan), "_plan_psum has refused others"
        at = placed(plan.scratch, scratch)
        tiles = Tiles(at.table, at.num_tiles, at.done_counters)
        return [
            tiles_of_ends_launch(ends, b.experts, a.rows, alignment, tiles, plan.tile_rows),
            grouped_launch(device, plan, a, b, out, tiles),
        ]

    return launches


def masked_launches(
    device: Device, plan: AnyPlan, a: Rows, b: Weights, out: Address, masked_m: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `m_grouped_fp8_gemm_nt_masked`."""
    if isinstance(plan, TritonGrouped):
        return triton_masked_launches(plan, a, b, out, masked_m, scratch)
    at = placed(plan.scratch, scratch)
    tiles = Tiles(at.table, at.num_tiles, at.done_counters)
    return [
        tiles_of_counts_launch(masked_m, b.experts, a.rows // b.experts, tiles, plan.tile_rows),
        grouped_launch(device, plan, a, b, out, tiles),
    ]
