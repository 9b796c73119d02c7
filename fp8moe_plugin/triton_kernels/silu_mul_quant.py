"""The activation and quantization by themselves, where GEMM 1 of the experts does not include them."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.arithmetic import activated, quantized
from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel


@triton.jit
def triton_silu_mul_quant(
    gate_up,
    counts,
    q,
    scales,
    max_m,
    channels,
    scale_k_block,
    gate_limit,
    activated_limit,
    up_limit,
    alpha,
    beta,
    PDL: tl.constexpr,
    MODIFIED_SWIGLU: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
):
    """e4m3 `q` `[groups, max_m, channels]` and its K-major scales, of bfloat16 `[groups, max_m, 2 * channels]`.

    Only of the first `counts[g]` rows of each group. A program does ROWS rows of 128 channels.
    """
    wait_for_previous_kernel(PDL)
    columns, blocks = channels // 128, tl.cdiv(max_m, ROWS)
    column_tile, block = tl.program_id(0) % columns, tl.program_id(0) // columns
    group = block // blocks
    row = block % blocks * ROWS + tl.arange(0, ROWS)
    inside = row < tl.minimum(tl.load(counts + group), max_m)
    row = group.to(tl.int64) * max_m + row
    column = column_tile * 128 + tl.arange(0, 128)
    at = row[:, None] * 2 * channels + column[None, :]
    gate = tl.load(gate_up + at, inside[:, None], 0.0)
    up = tl.load(gate_up + at + channels, inside[:, None], 0.0)
    inner = activated(gate, up, gate_limit, activated_limit, up_limit, alpha, beta, MODIFIED_SWIGLU)
    codes, of_rows = quantized(inner, UE8M0)
    tl.store(q + row[:, None] * channels + column[None, :], codes, inside[:, None])
    tl.store(scales + column_tile.to(tl.int64) * scale_k_block + row, of_rows, inside)
