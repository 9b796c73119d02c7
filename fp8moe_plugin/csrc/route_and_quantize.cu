// Routes the only chunk of pairs of a short step, by block 0, and quantizes its tokens, by the others.
//
// In:   ids, expert_map  see expert_ids.cuh;    x  see quantize.cu
// Out:  slots, tokens, num_rows, table, num_tiles, ready  see Routed in route.cuh;    q, scales  see quantize.cu
//
// Grid: a block, and as many as have a warp for eight tokens and a group. The next kernel waits for one, not for two of
// which one waits for the other.
#include "quantize.cuh"
#include "route.cuh"

extern "C" __global__ __launch_bounds__(THREADS, 1) void route_and_quantize(
    const void* __restrict__ ids, const int* __restrict__ expert_map, int* __restrict__ slots,
    int* __restrict__ tokens, int* __restrict__ num_rows, int4* __restrict__ table, int* __restrict__ num_tiles,
    int* __restrict__ ready, const uint4* __restrict__ x, uint2* __restrict__ q, float* __restrict__ scales, int ids_64,
    int pairs, int topk, int global_experts, int num_experts, int block_m, int tile_counters, int groups) {
    let_next_kernel_start();
    if (blockIdx.x == 0) {
        route_chunk({ids, expert_map, ids_64, pairs, global_experts, num_experts}, nullptr, 0, 1, topk, block_m,
                    tile_counters, {slots, tokens, num_rows, table, num_tiles, ready});
    } else {
        const int warp = (blockIdx.x - 1) * kWarps + threadIdx.x / kWarp, num_tokens = u32(pairs) / u32(topk);
        if (has_tokens(warp, num_tokens, groups))
            quantize_of_warp(warp, x, q, scales, nullptr, num_tokens, groups, 0);
    }
}
