"""The block-scaled GEMM of dense layers and of grouped rows."""

import triton
import triton.language as tl

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
def store(out, c, at, result, exists, added, F32: tl.constexpr):
    """`result`, with `c` if `added`, to bfloat16 or with F32 float32."""
    kind: tl.constexpr = tl.pointer_type(tl.float32 if F32 else tl.bfloat16)
    if added != 0:
        result += tl.load(c.to(kind) + at, exists, 0.0).to(tl.float32)
    tl.store(out.to(kind) + at, result.to(kind.element_ty), exists)


@triton.jit
def sums(
    x_at,
    x_scale_at,
    x_scale_k_block,
    w_at,
    w_scale_at,
    blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    ROW_SCALES: tl.constexpr,
):
    """The products of a tile, from the addresses of the first K block; ROW_SCALES as in `sums_of_both`."""
    total = empty_sums(BLOCK_M, BLOCK_N, SWAP)
    x_scale, w_scales = tl.load(x_scale_at), tl.load(w_scale_at)
    w_scale = 1.0 if ROW_SCALES else w_scales
    for block in range(1, blocks + 1):  # loads scales a block ahead: only what is multiplied goes through a pipeline
        ahead = tl.minimum(block, blocks - 1)
        next_x_scale = tl.load(x_scale_at + ahead * x_scale_k_block)
        if not ROW_SCALES:
            next_w_scale = tl.load(w_scale_at + ahead)
        total = add_product(total, tl.load(x_at), tl.load(w_at), x_scale, w_scale, SWAP)
        x_scale = next_x_scale
        if not ROW_SCALES:
            w_scale = next_w_scale
        x_at, w_at = x_at + 128, w_at + 128
    return scaled_columns(total, w_scales, SWAP) if ROW_SCALES else total


@triton.jit
def triton_gemm(
    a,
    a_scales,
    a_rows,
    b,
    b_scales,
    c,
    out,
    table,
    num_tiles,
    m,
    n,
    k,
    a_scale_row,
    a_scale_group,
    a_scale_k_block,
    gathered,
    added,
    grouped,
    group_m,
    bias,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    F32: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr = 0,
):
    """`out = a @ b.T (+ bias) (+ c)` with float32 sums, to which each K block is added scaled.

    `a` is `[rows, k]`, of which row i is read at `a_rows[i]` if `gathered`; `b` is `[experts, n, k]`; `c` and `out` are
    `[rows, n]`, bfloat16 or with F32 float32. Rows are those of the tile table if `grouped`, else `m`. `b_scales` are
    those of 128x128 blocks, or with ROW_SCALES of the rows of `b`. With BIAS `bias` is float32 `[experts, n]`.
    """
    wait_for_previous_kernel(PDL)
    columns = tl.cdiv(n, BLOCK_N)
    row_tiles = tl.where(grouped != 0, tl.load(num_tiles, grouped != 0, 0), tl.cdiv(m, BLOCK_M))
    if tl.program_id(0) >= row_tiles * columns:
        return
    tile, column_tile = tile_of_program(row_tiles, columns, group_m)
    expert, rows, end = rows_of_tile(table, tile, m, grouped, BLOCK_M)
    source = sources(a_rows, rows, end, gathered)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, 128)

    x_at = a + source[:, None] * k + channel[None, :]
    w_at = b + (expert.to(tl.int64) * n + tl.minimum(column, n - 1))[:, None] * k + channel[None, :]
    x_scale_at = a_scales + source * a_scale_row + expert.to(tl.int64) * a_scale_group
    if ROW_SCALES:
        w_scale_at = b_scales + expert.to(tl.int64) * n + tl.minimum(column, n - 1)
    else:
        w_scale_at = b_scales + (expert.to(tl.int64) * tl.cdiv(n, 128) + column_tile * BLOCK_N // 128) * (k // 128)
    blocks = k // 128
    total = sums(x_at, x_scale_at, a_scale_k_block, w_at, w_scale_at, blocks, BLOCK_M, BLOCK_N, SWAP, ROW_SCALES)
    total = plus_biases(total, bias + expert.to(tl.int64) * n + tl.minimum(column, n - 1), SWAP, BIAS)
    result = tl.trans(total) if SWAP else total
    at = rows.to(tl.int64)[:, None] * n + column[None, :]
    exists = (rows < end)[:, None] & (column < n)[None, :]
    store(out, c, at, result, exists, added, F32)
