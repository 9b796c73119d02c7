// Gives each (token, expert) pair a row such that rows of one expert follow one another, in the order of the pairs.
//
// In:   ids         int32 [pairs], global expert ids; an id outside [0, global_experts) gets no row
//       expert_map  int32 [global_experts], local expert or -1; null: global ids are local
// Out:  slots       int32 [pairs], the row of each pair; -1 for a pair whose expert is not here
//       tokens      int32 [pairs], the token of each row, of which there are *num_rows
//       counts      int32 [num_experts], rows of each expert
//       num_rows    int32 [1]
//
// IDS_64: 1 reads int64 ids.    Grid: num_experts.    ids is aligned to 16 bytes.
// Every CTA reads all ids (they stay in L2) and owns the pairs of one expert: no atomics, so the order is the same in
// each run. A warp owns a contiguous part of the ids, a lane 16 bytes of them at a time.
#include "common.cuh"

#if IDS_64
using Ids = longlong2;
using Id = long long;
#else
using Ids = int4;
using Id = int;
#endif

constexpr int kWarps = THREADS / kWarp;
constexpr int kBatch = 4;  // loads in flight
constexpr int kIds = sizeof(Ids) / sizeof(Id);
constexpr u32 kNoExpert = ~0u;  // above every expert

struct Router {
    const Ids* ids;
    const int* expert_map;
    int pairs;
    u32 global_experts;

    // Above every local expert for one that is not here; -1 becomes kNoExpert.
    DEVICE u32 local_expert(Id id) const {
        if (kIds == 2 && id != static_cast<int>(id)) return kNoExpert;
        if (expert_map == nullptr) return static_cast<u32>(id);
        return static_cast<u32>(id) < global_experts ? static_cast<u32>(expert_map[id]) : kNoExpert;
    }
    // The experts of the pairs from kIds * vector on; kNoExpert past the last pair.
    DEVICE void experts_of(int vector, u32 (&expert)[kIds]) const {
        alignas(sizeof(Ids)) Id id[kIds];
        if ((vector + 1) * kIds <= pairs) {
            *reinterpret_cast<Ids*>(id) = ids[vector];
        } else {
#pragma unroll
            for (int i = 0; i < kIds; ++i)
                id[i] = vector * kIds + i < pairs ? reinterpret_cast<const Id*>(ids)[vector * kIds + i] : -1;
        }
#pragma unroll
        for (int i = 0; i < kIds; ++i) expert[i] = local_expert(id[i]);
    }
    // Calls `visit(vector, experts)` for the vectors of a warp's part, in order.
    template <class Visit>
    DEVICE void for_each(int begin, int end, Visit visit) const {
#pragma unroll 1
        for (int first = begin + lane_of_warp(); __any_sync(kAllLanes, first < end); first += kBatch * kWarp) {
            u32 expert[kBatch][kIds];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) experts_of(first + i * kWarp, expert[i]);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) visit(first + i * kWarp, expert[i]);
        }
    }
};

template <class Visit>
DEVICE void for_each_bit(u32 bits, Visit visit) {
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1) visit(__ffs(bits) - 1);
}

extern "C" __global__ __launch_bounds__(THREADS) void route(const Ids* __restrict__ ids,
                                                             const int* __restrict__ expert_map,
                                                             int* __restrict__ slots, int* __restrict__ tokens,
                                                             int* __restrict__ counts, int* __restrict__ num_rows,
                                                             int pairs, int topk, int global_experts) {
    let_next_kernel_start();
    const Router router{ids, expert_map, pairs, static_cast<u32>(global_experts)};
    const u32 own = blockIdx.x, num_experts = gridDim.x;
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp(), vectors = ceil_div(pairs, kIds);
    const int vectors_per_warp = ceil_div(vectors, kWarps * kBatch * kWarp) * kBatch * kWarp;
    const int begin = min(warp * vectors_per_warp, vectors);
    const int end = min(begin + vectors_per_warp, vectors);

    // Count the pairs of the experts before this one, and of this one.
    int below = 0, equal = 0;
    router.for_each(begin, end, [&](int, const u32(&expert)[kIds]) {
#pragma unroll
        for (int i = 0; i < kIds; ++i) {
            below += expert[i] < own;
            equal += expert[i] == own;
        }
    });
    int row_begin, count;
    exclusive_scan<THREADS>(below, row_begin);
    const int before = exclusive_scan<THREADS>(equal, count);
    if (threadIdx.x == 0) {
        counts[own] = count;
        if (own == num_experts - 1) *num_rows = row_begin + count;
    }

    // Hand out the rows, starting with what the warps before this one need.
    int row = row_begin + __shfl_sync(kAllLanes, before, 0);
    router.for_each(begin, end, [&](int vector, const u32(&expert)[kIds]) {
        u32 mine = 0, missing = 0;  // a bit for each pair
#pragma unroll
        for (int i = 0; i < kIds; ++i) {
            mine |= u32(expert[i] == own) << i;
            missing |= u32(expert[i] >= num_experts) << i;
        }
        if (own == 0)
            for_each_bit(missing, [&](int i) {
                if (vector * kIds + i < pairs) slots[vector * kIds + i] = -1;
            });
        if (!__any_sync(kAllLanes, mine)) return;
        int next = row, own_pairs = __popc(mine);  // `next`: this lane's pairs follow those of the lanes before it
#pragma unroll
        for (int bit = 1; bit <= kIds; bit *= 2) {
            const u32 lanes = __ballot_sync(kAllLanes, own_pairs & bit);
            next += bit * __popc(lanes & ((1u << lane) - 1));
            row += bit * __popc(lanes);
        }
        for_each_bit(mine, [&](int i) {
            slots[vector * kIds + i] = next;
            tokens[next++] = (vector * kIds + i) / topk;
        });
    });
}
