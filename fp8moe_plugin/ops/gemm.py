"""Dense block-scaled FP8 GEMM."""

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.operands import Extent, Rows, Weights
from fp8moe_plugin.ops import devices, reference
from fp8moe_plugin.ops.checks import CheckedOnce, check_writable, two_parts
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.gemm_checks import check_blocks, check_out, check_out_apart, check_rows
from fp8moe_plugin.ops.operands import Quantized, in_rows, k_major, whole_k_blocks
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.settings import batch_invariant


def fp8_gemm_nt(a: Quantized, b: Quantized, out: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """`out = a @ b.T (+ c)`, accumulated in float32 every 128 K.

    Operands are read and written in place if their rows are contiguous; those of `a` and `b` may also be any multiple
    of 16 bytes apart. For any other layout, and for `b`'s scales in another order, a copy is made.

    Args:
        a: e4m3 `[M, K]` and float32 scales `[M, ceil(K/128)]` of any strides; K a multiple of 16, or 0.
        b: e4m3 `[N, K]` and float32 scales `[ceil(N/128), ceil(K/128)]` of any strides; N a multiple of 8.
        out: bfloat16 or float32 `[M, N]`, which shares no memory with `a` and `b`.
        c: addend of the dtype and shape of `out`, or None; it may be `out` itself.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device; with FP8MOE_DEBUG=1 also an `out` that overlaps with
            another argument.
    """
    a, b = two_parts("a", a), two_parts("b", b)
    _check_once(*a, *b, out, c)
    check_out_apart(out, a, b, c)
    m, k = a[0].shape
    if m and k and out.is_contiguous() and (c is None or c.is_contiguous()):
        return _multiply(a, b, out, c)
    if m and k:
        product = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out.copy_(_multiply(a, b, product, None if c is None else c.contiguous()))
    return out.zero_() if c is None else out.copy_(c)


def _check(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    out: torch.Tensor,
    c: torch.Tensor | None,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `fp8_gemm_nt`."""
    check_rows("a", a, a_scales, 2, empty_k=True)
    m, k = a.shape
    check_blocks("b", b, b_scales, 2, k, a.device)
    check_out("out", out, (m, b.shape[0]), (torch.bfloat16, torch.float32), a.device)
    check_writable("out", out)
    if c is not None:
        check_out("c", c, (m, b.shape[0]), out.dtype, a.device)


_check_once = CheckedOnce(_check)


def _multiply(a: Quantized, b: Quantized, out: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
    """Run `fp8_gemm_nt` with a contiguous `out` that is not empty."""
    device = devices.device_of(out)
    if device is None:
        product = reference.gemm(a, b)
        return out.copy_(product if c is None else product + c.float())
    output = Output.F32_DIRECT if out.dtype != torch.bfloat16 else Output.BF16 if c is None else Output.BF16_DIRECT
    (m, n), k = out.shape, ceil_div(a[0].shape[1], GROUP) * GROUP
    plan = device.backend.plan_dense(m, n, k, output, device.multiprocessors, batch_invariant())
    scales, *strides = k_major(*a)
    if not device.backend.reads_partial_k_blocks:
        a, b = (whole_k_blocks(a[0]), a[1]), (whole_k_blocks(b[0]), b[1])
    (rows, extent), (weights, weights_extent) = in_rows(a[0]), in_rows(b[0])
    run = prepared_gemm(device, plan, m, n, k, extent, weights_extent, strides[1], c is not None)
    tensors = rows, scales, weights, b[1].contiguous(), out
    run((*(tensor.data_ptr() for tensor in tensors), 0 if c is None else c.data_ptr()))
    return out


@prepares("fp8_gemm_nt")
def prepared_gemm(
    device: Device,
    plan: Plan,
    m: int,
    n: int,
    k: int,
    a_extent: Extent,
    b_extent: Extent,
    scale_k_block: int,
    added: bool,
) -> Prepared:
    """Returns a callable that launches `fp8_gemm_nt`, given addresses; `scale_k_block` is the stride of `k_major`."""
    a, a_scales, b, b_scales, out, c = map(Slot, range(6))
    rows = Rows(a, m, k, a_scales, 0, scale_k_block, a_extent)
    weights = Weights(b, 1, n, k, b_scales, b_extent)
    return device.prepare(plan.launches(rows, weights, out, c if added else 0))
