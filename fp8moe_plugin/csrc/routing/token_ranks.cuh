// The ranks that have the experts of a token.
#pragma once
#include "routing/expert_ids.cuh"

// A bit for each rank; by a warp. `owners` maps ids to ranks, as `expert_map`.
DEVICE u32 ranks_of_token(const ExpertIds& owners, int token) {
    u32 ranks = 0;
    for (int begin = 0; begin < owners.topk; begin += kWarp) {
        const int column = begin + lane_of_warp();
        const int rank = column < owners.topk ? owners.expert_of(token * owners.topk + column) : kNoExpert;
        ranks |= rank == kNoExpert ? 0 : 1u << rank;
    }
    return __reduce_or_sync(kAllLanes, ranks);
}
