"""Sums the expert rows of each token, weighted by the router."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel


@triton.jit
def triton_combine(
    rows, slots, weights, out, hidden, topk, shared_expert, routed_scale, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    """bfloat16 `out` `[T, hidden]`: the sum over j of `weights[t, j] * routed_scale * rows[slots[t, j]]` in order.

    In float32. A slot of -1 adds nothing. If `shared_expert` is 1, the last of the topk columns has weight 1 instead,
    and `weights` no column for it. A program does BLOCK channels of a token.
    """
    wait_for_previous_kernel(PDL)
    blocks = tl.cdiv(hidden, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    routed = topk - shared_expert
    for first in range(0, topk, 8):
        for i in tl.static_range(8):  # so that these loads do not wait for each other
            j = first + i
            slot = tl.load(slots + token * topk + j, j < topk, -1)
            weight = tl.load(weights + token * routed + j, j < routed, 1.0) * tl.where(j < routed, routed_scale, 1.0)
            row = tl.load(rows + slot.to(tl.int64) * hidden + channel, channel < tl.where(slot >= 0, hidden, 0), 0.0)
            total = tl.where(slot >= 0, total + weight * row.to(tl.float32), total)
    tl.store(out + token * hidden + channel, total.to(tl.bfloat16), channel < hidden)
