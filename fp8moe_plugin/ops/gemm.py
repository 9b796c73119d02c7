"""Dense block-scaled FP8 GEMM."""

import torch

from fp8moe_plugin.ops import backend, reference
from fp8moe_plugin.ops.checks import check_activations, check_aligned, check_tensor, check_weights
from fp8moe_plugin.ops.gemm_launches import dense_launch
from fp8moe_plugin.ops.operands import Quantized, Rows, Weights, k_major
from fp8moe_plugin.plan import Output


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
    scales, addend = k_major(*a), 0 if c is None else c.data_ptr()
    rows = Rows.of(a[0], scales)
    device.launch([dense_launch(device, rows, Weights.of(b), out.data_ptr(), output, c=addend)])
    return out
