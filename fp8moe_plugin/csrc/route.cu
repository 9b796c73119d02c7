// Gives each (token, expert) pair a row such that rows of one expert follow one another, in the order of the pairs.
//
// In:   ids         int32 [pairs], global expert ids; an id outside [0, global_experts) gets no row
//       expert_map  int32 [global_experts], local expert or -1; null: global ids are local
// Out:  slots       int32 [pairs], the row of each pair; -1 for a pair whose expert is not here
//       counts      int32 [num_experts], rows of each expert
//       num_rows    int32 [1]
//
// IDS_64: 1 reads int64 ids.    Grid: num_experts.
// Every CTA reads all ids (they stay in L2) and owns the pairs of one expert: no atomics, so the order is the same in
// each run. A warp owns a contiguous part of the ids.
#include "common.cuh"

#if IDS_64
using Id = long long;
#else
using Id = int;
#endif

constexpr int kWarps = THREADS / kWarp;
constexpr u32 kNoExpert = ~0u;  // above every expert

DEVICE u32 local_expert(Id id, const int* __restrict__ expert_map, int global_experts,
                          u32 num_experts) {
    if (id < 0 || id >= global_experts) return kNoExpert;
    const u32 expert = expert_map == nullptr ? static_cast<int>(id) : expert_map[id];
    return expert < num_experts ? expert : kNoExpert;
}

extern "C" __global__ __launch_bounds__(THREADS) void route(const Id* __restrict__ ids,
                                                             const int* __restrict__ expert_map,
                                                             int* __restrict__ slots, int* __restrict__ counts,
                                                             int* __restrict__ num_rows, int pairs,
                                                             int global_experts) {
    const u32 own = blockIdx.x;
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp();
    const int pairs_per_warp = ceil_div(ceil_div(pairs, kWarps), kWarp) * kWarp;
    const int begin = min(warp * pairs_per_warp, pairs);
    const int end = min(begin + pairs_per_warp, pairs);
    const auto expert_of = [&](int pair) { return local_expert(ids[pair], expert_map, global_experts, gridDim.x); };

    // Count the pairs of the experts before this one, and of this one.
    int below = 0, equal = 0;
#pragma unroll 4
    for (int pair = begin + lane; pair < end; pair += kWarp) {
        const u32 expert = expert_of(pair);
        below += expert < own;
        equal += expert == own;
    }
    int row_begin, count;
    exclusive_scan<THREADS>(below, row_begin);
    const int before = exclusive_scan<THREADS>(equal, count);
    if (threadIdx.x == 0) {
        counts[own] = count;
        if (own == gridDim.x - 1) *num_rows = row_begin + count;
    }

    // Hand out the rows, starting with what the warps before this one need.
    int row = row_begin + __shfl_sync(kAllLanes, before, 0);
#pragma unroll 4
    for (int base = begin; base < end; base += kWarp) {
        const int pair = base + lane;
        const u32 expert = pair < end ? expert_of(pair) : kNoExpert;
        const u32 lanes = __ballot_sync(kAllLanes, expert == own);
        if (expert == own) slots[pair] = row + __popc(lanes & ((1u << lane) - 1));
        if (own == 0 && expert == kNoExpert && pair < end) slots[pair] = -1;
        row += __popc(lanes);
    }
}
