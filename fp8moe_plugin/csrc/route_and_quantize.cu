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
    const void* ids, const int* expert_map, int* slots, int* tokens, int* num_rows, int4* table, int* num_tiles,
    int* ready, const uint4* x, uint2* q, float* scales, int ids_64, int pairs, int topk, int global_experts,
    int num_experts, int block_m, int tile_counters, int groups) {
    let_next_kernel_start();
    if (blockIdx.x == 0)
        route_chunk({ids, expert_map, ids_64, pairs, global_experts, num_experts}, nullptr, 0, 1, topk, block_m,
                    tile_counters, {slots, tokens, num_rows, table, num_tiles, ready});
    else
        quantize_of_warp((blockIdx.x - 1) * kWarps + threadIdx.x / kWarp, x, q, scales, nullptr, pairs / topk, groups,
                         0);
}
