"""GEMM 1 of the experts with SwiGLU and the quantization of its result."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.arithmetic import activated, quantized
from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel
from fp8moe_plugin.triton_kernels.operands import (
    add_product,
    empty_sums,
    plus_biases,
    rows_of_tile,
    scaled_columns,
    sources,
    tile_of_program,
)


@triton.jit
def sums_of_both(
    x_at,
    x_scale_at,
    x_scale_k_block,
    gate_at,
    gate_scale_at,
    up_at,
    up_scale_at,
    blocks,
    BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr,
    ROW_SCALES: tl.constexpr,
):
    """The products of a tile's rows with 128 channels of both projections, from the addresses of the first K block.

    With ROW_SCALES each row of weights has a scale, with which its sums are multiplied, else each K block.
    """
    gate, up = empty_sums(BLOCK_M, 128, SWAP), empty_sums(BLOCK_M, 128, SWAP)
    x_scale, gate_scales, up_scales = tl.load(x_scale_at), tl.load(gate_scale_at), tl.load(up_scale_at)
    if ROW_SCALES:
        gate_scale, up_scale = 1.0, 1.0
    else:
        gate_scale, up_scale = gate_scales, up_scales
    for block in range(1, blocks + 1):  # loads scales a block ahead: only what is multiplied goes through a pipeline
        ahead = tl.minimum(block, blocks - 1)
        next_x_scale = tl.load(x_scale_at + ahead * x_scale_k_block)
        if not ROW_SCALES:
            next_scales = tl.load(gate_scale_at + ahead), tl.load(up_scale_at + ahead)
        x = tl.load(x_at)
        gate = add_product(gate, x, tl.load(gate_at), x_scale, gate_scale, SWAP)
        up = add_product(up, x, tl.load(up_at), x_scale, up_scale, SWAP)
        x_scale = next_x_scale
        if not ROW_SCALES:
            gate_scale, up_scale = next_scales[0], next_scales[1]
        x_at, gate_at, up_at = x_at + 128, gate_at + 128, up_at + 128
    if ROW_SCALES:
        gate, up = scaled_columns(gate, gate_scales, SWAP), scaled_columns(up, up_scales, SWAP)
    return gate, up


@triton.jit
def scales_of_both(b_scales, expert, channels, column_tile, column, blocks, ROW_SCALES: tl.constexpr):
    """The addresses of the scales of 128 channels of both projections, in the first K block or of their rows."""
    if ROW_SCALES:
        gate_at = b_scales + expert.to(tl.int64) * 2 * channels + column
        return gate_at, gate_at + channels
    else:
        columns = channels // 128
        gate_at = b_scales + (expert.to(tl.int64) * 2 * columns + column_tile) * blocks
        return gate_at, gate_at + columns * blocks


@triton.jit
def triton_gate_up(
    a,
    a_scales,
    a_rows,
    b,
    b_scales,
    q,
    scales,
    table,
    num_tiles,
    channels,
    k,
    a_scale_row,
    a_scale_group,
    a_scale_k_block,
    scale_k_block,
    gathered,
    group_m,
    gate_limit,
    activated_limit,
    up_limit,
    alpha,
    beta,
    bias,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr,
    MODIFIED_SWIGLU: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    UE8M0: tl.constexpr,
    BIAS: tl.constexpr = 0,
):
    """e4m3 `q` `[rows, channels]` and its K-major scales, of the activation of `gate, up = a @ b.T (+ bias)`.

    `b` is `[experts, 2 * channels, k]`, gate first; with BIAS `bias` is float32 `[experts, 2 * channels]`. The rest
    is as for triton_gemm. A program computes 128 channels, so that it has whole groups of the quantization.
    """
    wait_for_previous_kernel(PDL)
    columns, row_tiles = channels // 128, tl.load(num_tiles)
    if tl.program_id(0) >= row_tiles * columns:
        return
    tile, column_tile = tile_of_program(row_tiles, columns, group_m)
    expert, rows, end = rows_of_tile(table, tile, 0, 1, BLOCK_M)
    source = sources(a_rows, rows, end, gathered)
    column, channel = column_tile * 128 + tl.arange(0, 128), tl.arange(0, 128)

    x_at = a + source[:, None] * k + channel[None, :]
    gate_at = b + (expert.to(tl.int64) * 2 * channels + column)[:, None] * k + channel[None, :]
    up_at = gate_at + tl.cast(channels, tl.int64) * k
    x_scale_at = a_scales + source * a_scale_row + expert.to(tl.int64) * a_scale_group
    gate_scale_at, up_scale_at = scales_of_both(b_scales, expert, channels, column_tile, column, k // 128, ROW_SCALES)
    weights = gate_at, gate_scale_at, up_at, up_scale_at
    gate, up = sums_of_both(x_at, x_scale_at, a_scale_k_block, *weights, k // 128, BLOCK_M, SWAP, ROW_SCALES)
    bias_at = bias + expert.to(tl.int64) * 2 * channels + column
    gate, up = plus_biases(gate, bias_at, SWAP, BIAS), plus_biases(up, bias_at + channels, SWAP, BIAS)
    inner = activated(gate, up, gate_limit, activated_limit, up_limit, alpha, beta, MODIFIED_SWIGLU)
    codes, of_rows = quantized(tl.trans(inner) if SWAP else inner, UE8M0)
    tl.store(q + rows.to(tl.int64)[:, None] * channels + column[None, :], codes, (rows < end)[:, None])
    tl.store(scales + column_tile.to(tl.int64) * scale_k_block + rows, of_rows, rows < end)
