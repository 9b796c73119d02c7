"""Dense block-scaled FP8 GEMM."""

import torch

from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import check_activations, check_aligned, check_tensor, check_weights
from fp8moe_plugin.ops.gemm_launches import dense_launch
from fp8moe_plugin.ops.operands import Quantized, Rows, Weights, k_major
from fp8moe_plugin.plan import DensePlan, Output, plan_dense


def fp8_gemm_nt(a: Quantized, b: Quantized, out: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """`out = a @ b.T (+ c)`, accumulated in float32 every 128 K.

    Args:
        a: e4m3 `[M, K]` and float32 scales `[M, K/128]` of any strides; K a multiple of 128.
        b: e4m3 `[N, K]` and float32 scales `[ceil(N/128), K/128]`; N a multiple of 8.
        out: bfloat16 or float32 `[M, N]`.
        c: as `out`, or None.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_activations("a", a, dims=2)
    m, k = a[0].shape
    check_weights("b", b, 2, k, a[0].device)
    n = b[0].shape[0]
    check_tensor("out", out, dtype=(torch.bfloat16, torch.float32), shape=(m, n), device=a[0].device)
    check_aligned("out", out)
    if c is not None:
        check_tensor("c", c, dtype=out.dtype, shape=(m, n), device=a[0].device)
        check_aligned("c", c)
    device = backend.device_of(out)
    if m == 0:
        return out
    if device is None:
        product = reference.gemm(a, b)
        return out.copy_(product if c is None else product + c.float())
    output = Output.F32_DIRECT if out.dtype != torch.bfloat16 else Output.BF16 if c is None else Output.BF16_DIRECT
    plan, (scales, *strides) = plan_dense(m, n, k, output, device.multiprocessors), k_major(*a)
    addend = 0 if c is None else c.data_ptr()
    run = prepared_gemm(device, plan, m, n, k, strides[1], c is not None)
    run((a[0].data_ptr(), scales.data_ptr(), b[0].data_ptr(), b[1].data_ptr(), out.data_ptr(), addend))
    return out


@prepares("fp8_gemm_nt")
def prepared_gemm(device: Device, plan: DensePlan, m: int, n: int, k: int, scale_k_block: int, added: bool) -> Prepared:
    """What launches `fp8_gemm_nt`, given the addresses in it; `scale_k_block` is the stride of `k_major`."""
    a, a_scales, b, b_scales, out, c = map(Slot, range(6))
    rows, weights = Rows(a, m, k, a_scales, 0, scale_k_block), Weights(b, 1, n, k, b_scales)
    return device.prepare([dense_launch(device, plan, rows, weights, out, c=c if added else 0)])
