// Routes all chunks of pairs, see route.cuh.
//
// In:   ids, expert_map  see expert_ids.cuh;    counts  see route_chunk
// Out:  slots, tokens, num_rows, table, num_tiles, ready  see Routed
//
// Grid: chunks. Launched early, behind count_experts, if there is more than one.
#include "route.cuh"

// Allowed more registers than two blocks of a multiprocessor would have: else a batch is loaded piece by piece.
extern "C" __global__ __launch_bounds__(THREADS, 1) void route(
    const void* __restrict__ ids, const int* __restrict__ expert_map, const u32* counts, int* __restrict__ slots,
    int* __restrict__ tokens, int* __restrict__ num_rows, int4* __restrict__ table, int* __restrict__ num_tiles,
    int* __restrict__ ready, int ids_64, int pairs, int topk, int global_experts, int num_experts, int block_m,
    int tile_counters) {
    let_next_kernel_start();
    route_chunk({ids, expert_map, ids_64, pairs, global_experts, num_experts}, counts, blockIdx.x, gridDim.x, topk,
                block_m, tile_counters, {slots, tokens, num_rows, table, num_tiles, ready});
}
