"""The experts of few tokens in two kernels: each program finds the experts of its pairs in the router's ids.

The weights of an expert that several tokens have are read for each of them. A tensor core multiplies at least eight
rows, so it would not help one; products are summed in float32, 128 channels at a time, and then scaled.
"""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.arithmetic import activated, quantized
from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel
from fp8moe_plugin.triton_kernels.route import local_experts


@triton.jit
def scaled_products(codes, code_scales, w, w_scales):
    """Scaled products of G groups of 128 channels, e4m3 `[G, 128]` by e4m3 `[G, N, 128]`.

    float32 `[G, N, 8]`: each thread adds up its 16 channels, and what threads have is added up in the end.
    """
    products = w.to(tl.float32) * codes.to(tl.float32)[:, None, :]
    of_threads = tl.sum(tl.reshape(products, [w.shape[0], w.shape[1], 8, 16]), 3)
    return of_threads * (code_scales * w_scales)[:, None, None]


@triton.jit
def sum_of_threads(sums):
    """float32 `[N]` of `[G, N, 8]`."""
    return tl.sum(tl.sum(sums, 2), 0)


@triton.jit
def group_scales(scale_at, group, exists, ROW_SCALES: tl.constexpr):
    """The scales of a block of rows in K blocks; with ROW_SCALES 1, because those of rows are applied to the sums."""
    if ROW_SCALES:
        return tl.full(group.shape, 1.0, tl.float32)
    else:
        return tl.load(scale_at + group, exists, 0.0)


@triton.jit
def scaled_sum(sums, scale_at, bias_at, ROW_SCALES: tl.constexpr, BIAS: tl.constexpr):
    """`sum_of_threads`, with ROW_SCALES times the scales of N rows, with BIAS plus their biases."""
    total = sum_of_threads(sums)
    if ROW_SCALES:
        total *= tl.load(scale_at)
    if BIAS:
        total += tl.load(bias_at)
    return total


@triton.jit
def both_sums(gate, up, b_scales, bias, expert, channels, column, ROW_SCALES: tl.constexpr, BIAS: tl.constexpr):
    """`scaled_sum` of both projections."""
    scale_at = b_scales + expert.to(tl.int64) * 2 * channels + column
    bias_at = bias + expert.to(tl.int64) * 2 * channels + column
    gate_sum = scaled_sum(gate, scale_at, bias_at, ROW_SCALES, BIAS)
    return gate_sum, scaled_sum(up, scale_at + channels, bias_at + channels, ROW_SCALES, BIAS)


@triton.jit
def scaled_pairs(products, b_scales, expert, hidden, column, here, ROW_SCALES: tl.constexpr):
    """The products of G groups of pairs, with ROW_SCALES times the scales of N rows."""
    if ROW_SCALES:
        scale_at = b_scales + expert.to(tl.int64)[:, None] * hidden + column[None, :]
        products *= tl.load(scale_at, here[:, None], 0.0)[:, :, None]
    return products


@triton.jit
def plus_pair_biases(products, bias, expert, hidden, column, weight, begins, BIAS: tl.constexpr):
    """The products, with BIAS plus weighted biases where a pair `begins`: an eighth in each thread."""
    if BIAS:
        bias_at = bias + expert.to(tl.int64)[:, None] * hidden + column[None, :]
        products += (tl.load(bias_at, begins[:, None], 0.0) * (weight * 0.125)[:, None])[:, :, None]
    return products


@triton.jit
def router_weight(weights, token, choice, weight_columns, here, routed_scale):
    """The weight of each choice of a token, 1 past the last column of `weights`."""
    weighted = choice < weight_columns
    weight = tl.load(weights + token * weight_columns + choice, here & weighted, 1.0)
    return weight * tl.where(weighted, routed_scale, 1.0)


@triton.jit
def triton_gate_up_small_batch(
    x,
    ids,
    expert_map,
    b,
    b_scales,
    inner,
    channels,
    k,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    gate_limit,
    activated_limit,
    up_limit,
    alpha,
    beta,
    bias,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    MODIFIED_SWIGLU: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    UE8M0: tl.constexpr,
    BIAS: tl.constexpr = 0,
):
    """bfloat16 `inner` `[pairs, channels]`: the activation of `gate, up = b[expert] @ x[token]`, quantizing x.

    `x` is bfloat16 `[tokens, k]`, `b` e4m3 `[experts, 2 * channels, k]`. Pairs without an expert here are not written.
    """
    wait_for_previous_kernel(PDL)
    columns = channels // BLOCK_N
    pair, column_tile = tl.program_id(0) // columns, tl.program_id(0) % columns
    sizes = pairs, topk, shared_expert, ids_64, mapped, routed_experts, num_experts
    expert = local_experts(ids, expert_map, pair, *sizes)
    if expert < 0:
        return
    blocks, channel, column = k // 128, tl.arange(0, 128), column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + (pair // topk).to(tl.int64) * k
    gate_at = b + (expert.to(tl.int64) * 2 * channels + column)[None, :, None] * k + channel[None, None, :]
    up_at = gate_at + tl.cast(channels, tl.int64) * k
    scale_at = b_scales + (expert.to(tl.int64) * 2 * (channels // 128) + column_tile * BLOCK_N // 128) * blocks
    gate, up = tl.zeros([GROUPS, BLOCK_N, 8], tl.float32), tl.zeros([GROUPS, BLOCK_N, 8], tl.float32)
    for first in range(0, blocks, GROUPS):
        group = first + tl.arange(0, GROUPS)
        exists = group < blocks
        gate_w = tl.load(gate_at + group[:, None, None] * 128, exists[:, None, None], 0.0)
        up_w = tl.load(up_at + group[:, None, None] * 128, exists[:, None, None], 0.0)
        gate_scales = group_scales(scale_at, group, exists, ROW_SCALES)
        up_scales = group_scales(scale_at + channels // 128 * blocks, group, exists, ROW_SCALES)
        codes, scales = quantized(tl.load(x_at + group[:, None] * 128 + channel[None, :], exists[:, None], 0.0), UE8M0)
        gate += scaled_products(codes, scales, gate_w, gate_scales)
        up += scaled_products(codes, scales, up_w, up_scales)
    of_pair = both_sums(gate, up, b_scales, bias, expert, channels, column, ROW_SCALES, BIAS)
    result = activated(*of_pair, gate_limit, activated_limit, up_limit, alpha, beta, MODIFIED_SWIGLU)
    tl.store(inner + pair.to(tl.int64) * channels + column, result)


@triton.jit
def triton_down_small_batch(
    inner,
    ids,
    expert_map,
    weights,
    b,
    b_scales,
    out,
    hidden,
    k,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    weight_columns,
    routed_scale,
    bias,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    UE8M0: tl.constexpr,
    BIAS: tl.constexpr = 0,
):
    """bfloat16 `out` `[tokens, hidden]`: the weighted sum of a token's experts, quantizing `inner`; see combine.py.

    `inner` is bfloat16 `[pairs, k]`, `b` e4m3 `[experts, hidden, k]`. A program computes BLOCK_N channels of a token.
    It goes through the groups of 128 channels of all its pairs as if they were those of one K. With BIAS the result of
    each pair has the expert's `bias`, float32 `[experts, hidden]`, added.
    """
    wait_for_previous_kernel(PDL)
    columns = hidden // BLOCK_N
    token, column_tile = tl.program_id(0) // columns, tl.program_id(0) % columns
    blocks, channel, column = k // 128, tl.arange(0, 128), column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_at = column[:, None].to(tl.int64) * k + channel[None, :]
    sizes = pairs, topk, shared_expert, ids_64, mapped, routed_experts, num_experts
    total = tl.zeros([GROUPS, BLOCK_N, 8], tl.float32)
    for first in range(0, topk * blocks, GROUPS):
        unit = first + tl.arange(0, GROUPS)
        choice, group = unit // blocks, unit % blocks
        pair = tl.where(choice < topk, token * topk + choice, pairs)
        expert = local_experts(ids, expert_map, pair, *sizes)
        here = expert >= 0
        group_at = expert.to(tl.int64) * hidden * k + group * 128
        w = tl.load(b + (group_at[:, None, None] + row_at[None, :, :]), here[:, None, None], 0.0)
        scale_row = expert.to(tl.int64) * (hidden // 128) + column_tile * BLOCK_N // 128
        w_scales = group_scales(b_scales + scale_row * blocks, group, here, ROW_SCALES)
        weight = router_weight(weights, token, choice, weight_columns, here, routed_scale)
        value_at = inner + (pair.to(tl.int64) * k + group * 128)[:, None] + channel[None, :]
        codes, scales = quantized(tl.load(value_at, here[:, None], 0.0), UE8M0)
        products = scaled_products(codes, scales, w, w_scales) * weight[:, None, None]
        products = scaled_pairs(products, b_scales, expert, hidden, column, here, ROW_SCALES)
        total += plus_pair_biases(products, bias, expert, hidden, column, weight, here & (group == 0), BIAS)
    tl.store(out + token.to(tl.int64) * hidden + column, sum_of_threads(total).to(tl.bfloat16))
