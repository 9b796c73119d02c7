"""The first kernel of a layer of experts: quantization of the tokens, with the routing of the pairs beside it."""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel
from fp8moe_plugin.triton_kernels.quantize import quantize_tile
from fp8moe_plugin.triton_kernels.route import count_experts, route_few


@triton.jit
def triton_quantize_route(
    x,
    q,
    scales,
    num_tokens,
    k,
    ids,
    expert_map,
    slots,
    tokens,
    table,
    num_tiles,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    block_m,
    PDL: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Of at most CHUNK pairs: the first program does `route_few`, the others `quantize_tile`, with row-major scales."""
    wait_for_previous_kernel(PDL)
    if tl.program_id(0) == 0:
        route_few(
            ids,
            expert_map,
            slots,
            tokens,
            table,
            num_tiles,
            ids_64,
            mapped,
            shared_expert,
            pairs,
            topk,
            routed_experts,
            num_experts,
            block_m,
            CHUNK,
            EXPERTS,
        )
    else:
        quantize_tile(tl.program_id(0) - 1, x, q, scales, num_tokens, k, k // 128, 1, UE8M0, ROWS)


@triton.jit
def triton_quantize_count(
    x,
    q,
    scales,
    num_tokens,
    k,
    ids,
    expert_map,
    counts,
    slots,
    chunks,
    parts,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    PDL: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The first `chunks` programs do `count_experts`, the others `quantize_tile`, with row-major scales."""
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    if program < chunks:
        count_experts(
            program,
            parts,
            ids,
            expert_map,
            counts,
            slots,
            ids_64,
            mapped,
            shared_expert,
            pairs,
            topk,
            routed_experts,
            num_experts,
            CHUNK,
            EXPERTS,
        )
    else:
        quantize_tile(program - chunks, x, q, scales, num_tokens, k, k // 128, 1, UE8M0, ROWS)
