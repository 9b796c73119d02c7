"""Sums the expert rows of each token, weighted by the router."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel


@triton.jit
def triton_combine(
    rows, slots, weights, out, hidden, topk, weight_columns, routed_scale, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    """bfloat16 `out` `[T, hidden]`: the sum over j of `weights[t, j] * routed_scale * rows[slots[t, j]]` in order.

    In float32. A slot of -1 adds nothing. `weights` are `[T, weight_columns]`; a further column, a shared expert's, has
    weight 1. A program does BLOCK channels of a token.
    """
    wait_for_previous_kernel(PDL)
    blocks = tl.cdiv(hidden, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, topk, 8):
        for i in tl.static_range(8):  # so that these loads do not wait for each other
            j = first + i
            slot = tl.load(slots + token * topk + j, j < topk, -1)
            weighted = j < weight_columns
            weight = tl.load(weights + token * weight_columns + j, weighted, 1.0)
            weight *= tl.where(weighted, routed_scale, 1.0)
            row = tl.load(rows + slot.to(tl.int64) * hidden + channel, channel < tl.where(slot >= 0, hidden, 0), 0.0)
            total = tl.where(slot >= 0, total + weight * row.to(tl.float32), total)
    tl.store(out + token * hidden + channel, total.to(tl.bfloat16), channel < hidden)
