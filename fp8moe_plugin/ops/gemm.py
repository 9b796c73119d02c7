"""Dense block-scaled FP8 GEMM."""

import torch

from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import check_activations, check_aligned, check_tensor, check_weights
from fp8moe_plugin.ops.gemm_launch import launch_gemm
from fp8moe_plugin.ops.quantize import Quantized, dequantize_rows


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
    return gemm(a, b, out, c)


def gemm(a: Quantized, b: Quantized, out: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """`fp8_gemm_nt` for operands that have been checked."""
    if out.shape[0] == 0:
        return out
    if uses_sm90(out):
        launch_gemm(a, b, out, c, None)
        return out
    product = gemm_reference(a, b)
    return out.copy_(product if c is None else product + c.float())


def gemm_reference(a: Quantized, b: Quantized) -> torch.Tensor:
    """float32 `a @ b.T` of the dequantized operands, also under `torch.autocast`, which would round them."""
    with torch.autocast(a[0].device.type, enabled=False):
        return dequantize_rows(*a) @ dequantize_blocks(*b).T


def dequantize_blocks(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 `[.., N, K]` from e4m3 `[.., N, K]` and scales `[.., ceil(N/128), ceil(K/128)]`."""
    n, k = w.shape[-2:]
    wide = scales.repeat_interleave(GROUP, -2)[..., :n, :].repeat_interleave(GROUP, -1)[..., :k]
    return w.float() * wide
