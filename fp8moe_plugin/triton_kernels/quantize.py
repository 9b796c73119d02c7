"""Quantizes bfloat16 tokens to e4m3, with a float32 scale per token and 128 channels."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.arithmetic import quantized
from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel


@triton.jit
def quantize_tile(tile, x, q, scales, tokens, k, scale_row, scale_k_block, UE8M0: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of 128 channels, of `q` and `scales` of `x`."""
    groups = k // 128
    group = tile % groups
    row = tile // groups * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    at = row.to(tl.int64)[:, None] * k + group * 128 + tl.arange(0, 128)[None, :]
    codes, of_rows = quantized(tl.load(x + at, inside[:, None], 0.0), UE8M0)
    tl.store(q + at, codes, inside[:, None])
    tl.store(scales + row.to(tl.int64) * scale_row + group.to(tl.int64) * scale_k_block, of_rows, inside)


@triton.jit
def triton_quantize(
    x,
    q,
    scales,
    tokens,
    k,
    scale_row,
    scale_k_block,
    PDL: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`q` and `scales` of `x`, all `[tokens, k]`, a scale each 128 channels.

    `scale_row` and `scale_k_block` are the strides of the scales.
    """
    wait_for_previous_kernel(PDL)
    quantize_tile(tl.program_id(0), x, q, scales, tokens, k, scale_row, scale_k_block, UE8M0, ROWS)
