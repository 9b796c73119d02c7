"""The GEMMs of experts in packed MXFP4, whose weights are decoded to e4m3 before they are multiplied.

fp8moe_plugin/ops/mxfp4.py has the layout. A row of a chunk has 16 words of 8 codes each, whose channels are not
consecutive. The activations are loaded in the order of the codes, so nothing is rearranged.
"""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.arithmetic import activated, quantized
from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel
from fp8moe_plugin.triton_kernels.operands import (
    add_product,
    empty_sums,
    plus_biases,
    rows_of_tile,
    sources,
    tile_of_program,
)

CHUNK_WORDS, CODE_BYTES = tl.constexpr(2176), tl.constexpr(8192)


@triton.jit
def decoded(chunks, chunk, slab, warp, lane, half):
    """e4m3 `[128, 128]`, without the base, of the rows at `[128]` places in chunks; see `Chunks` in ops/mxfp4.py."""
    word, code = tl.arange(0, 16)[None, :], tl.arange(0, 8)[None, None, None, :]
    row = chunk * CHUNK_WORDS + slab * 1024 + warp * 128 + lane * 16 + half
    exponents_of_row = chunk * CHUNK_WORDS * 4 + slab * 256 + warp * 64 + lane * 8 + half * 4 + CODE_BYTES
    slot = word % 4 ^ lane[:, None] // 2  # of the thread of a word, see `swizzled` in ops/mxfp4_words.py
    words = tl.load(chunks + (row[:, None] + word // 8 * 512 + slot * 4 + word // 4 % 2 * 2))
    exponents = tl.load(chunks.to(tl.pointer_type(tl.uint8)) + (exponents_of_row[:, None] + tl.arange(0, 4)[None, :]))
    words = tl.reshape(words, [128, 4, 4])[:, :, :, None]
    magnitudes = words >> 4 * code & 7
    ones = (magnitudes + 252 << 22).to(tl.float32, bitcast=True)  # from magnitude 2, which is 1, on
    values = tl.where(magnitudes < 2, magnitudes.to(tl.float32) * 0.5, ones)
    powers = (exponents.to(tl.int32) + (119 << 3) << 20).to(tl.float32, bitcast=True)  # 2^(q - 8)
    values *= powers[:, :, None, None]
    signs = (words >> 8 * (code % 4) + 7 - code // 4 * 4 & 1) << 31
    signed = (values.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)
    in_words = tl.reshape(signed.to(tl.float8e4nv), [128, 4, 4, 2, 4])  # of word 0 channels 0 to 3 and 16 to 19
    return tl.reshape(tl.permute(in_words, (0, 1, 3, 2, 4)), [128, 128])


@triton.jit
def block_of_step(scales, step, steps, blocks):
    """The K block of a step; those of further steps follow the bases of all."""
    further = tl.load(scales + steps + step - blocks, step >= blocks, 0.0)
    return tl.where(step < blocks, step, further.to(tl.int32))


@triton.jit
def packed_sums_of_both(
    x_at,
    x_scale_at,
    x_scale_k_block,
    chunks,
    gate_scales,
    up_scales,
    steps,
    blocks,
    BLOCK_M: tl.constexpr,
):
    """The products of a tile's rows with 128 channels of both projections, transposed."""
    c = tl.arange(0, 128)
    gate, up = empty_sums(BLOCK_M, 128, True), empty_sums(BLOCK_M, 128, True)
    for step in range(0, steps):
        block = block_of_step(gate_scales, step, steps, blocks)
        x, x_scale = tl.load(x_at + block * 128), tl.load(x_scale_at + block * x_scale_k_block)
        at = chunks + tl.cast(step, tl.int64) * 2 * CHUNK_WORDS
        w = decoded(at, c // 64, c // 32 % 2, c // 8 % 4, c % 8, 0)
        gate = add_product(gate, x, w, x_scale, tl.load(gate_scales + step), True)
        w = decoded(at, c // 64, c // 32 % 2, c // 8 % 4, c % 8, 1)
        up = add_product(up, x, w, x_scale, tl.load(up_scales + step), True)
    return gate, up


@triton.jit
def triton_packed_gate_up(
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
    steps,
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
    MODIFIED_SWIGLU: tl.constexpr,
    UE8M0: tl.constexpr,
    BIAS: tl.constexpr = 0,
):
    """As triton_gate_up; `steps`: of K, with further ones."""
    wait_for_previous_kernel(PDL)
    columns, row_tiles, blocks = channels // 128, tl.load(num_tiles), k // 128
    if tl.program_id(0) >= row_tiles * columns:
        return
    tile, column_tile = tile_of_program(row_tiles, columns, group_m)
    expert, rows, end = rows_of_tile(table, tile, 0, 1, BLOCK_M)
    source = sources(a_rows, rows, end, gathered)
    x_at = a + source[:, None] * k + tl.arange(0, 128)[None, :]
    x_scale_at = a_scales + source * a_scale_row + expert.to(tl.int64) * a_scale_group

    c, pitch = tl.arange(0, 128), 2 * steps - blocks
    chunks = b + (expert.to(tl.int64) * columns + column_tile) * steps * 2 * CHUNK_WORDS
    gate_scales = b_scales + (expert.to(tl.int64) * 2 * columns + column_tile) * pitch
    scales_of_both = gate_scales, gate_scales + columns * pitch
    gate, up = packed_sums_of_both(x_at, x_scale_at, a_scale_k_block, chunks, *scales_of_both, steps, blocks, BLOCK_M)
    column = column_tile * 128 + c
    bias_at = bias + expert.to(tl.int64) * 2 * channels + column
    gate, up = plus_biases(gate, bias_at, True, BIAS), plus_biases(up, bias_at + channels, True, BIAS)
    inner = activated(gate, up, gate_limit, activated_limit, up_limit, alpha, beta, MODIFIED_SWIGLU)
    codes, of_rows = quantized(tl.trans(inner), UE8M0)
    tl.store(q + rows.to(tl.int64)[:, None] * channels + column[None, :], codes, (rows < end)[:, None])
    tl.store(scales + column_tile.to(tl.int64) * scale_k_block + rows, of_rows, rows < end)


@triton.jit
def triton_packed_gemm(
    a,
    a_scales,
    b,
    b_scales,
    out,
    table,
    num_tiles,
    n,
    k,
    steps,
    a_scale_row,
    a_scale_group,
    a_scale_k_block,
    group_m,
    bias,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BIAS: tl.constexpr = 0,
):
    """As triton_gemm for the rows of a tile table, in columns of 128; `steps`: of K, with further ones."""
    wait_for_previous_kernel(PDL)
    columns, row_tiles, blocks = n // 128, tl.load(num_tiles), k // 128
    if tl.program_id(0) >= row_tiles * columns:
        return
    tile, column_tile = tile_of_program(row_tiles, columns, group_m)
    expert, rows, end = rows_of_tile(table, tile, 0, 1, BLOCK_M)
    source = sources(table, rows, end, 0)
    x_at = a + source[:, None] * k + tl.arange(0, 128)[None, :]
    x_scale_at = a_scales + source * a_scale_row + expert.to(tl.int64) * a_scale_group

    c = tl.arange(0, 128)
    row_block = expert.to(tl.int64) * columns + column_tile
    chunks = b + row_block * steps * CHUNK_WORDS
    w_scales = b_scales + row_block * (2 * steps - blocks)
    total = empty_sums(BLOCK_M, 128, True)
    for step in range(0, steps):
        block = block_of_step(w_scales, step, steps, blocks)
        x, x_scale = tl.load(x_at + block * 128), tl.load(x_scale_at + block * a_scale_k_block)
        at = chunks + tl.cast(step, tl.int64) * CHUNK_WORDS
        w = decoded(at, 0, c // 64, c // 16 % 4, c % 8, c // 8 % 2)
        total = add_product(total, x, w, x_scale, tl.load(w_scales + step), True)

    column = column_tile * 128 + c
    total = plus_biases(total, bias + expert.to(tl.int64) * n + column, True, BIAS)
    at = rows.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + at, tl.trans(total).to(tl.bfloat16), (rows < end)[:, None])
