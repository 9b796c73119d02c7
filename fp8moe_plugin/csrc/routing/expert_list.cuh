// The local experts of the tokens of a small batch, each once, in ascending order.
#pragma once
#include "routing/expert_ids.cuh"

constexpr int kMaxPairs = SMALL_BATCH_PAIRS;
static_assert(MAX_LOCAL_EXPERTS <= 32 * kWarp, "a bit for each expert, in one word per lane");

struct ExpertList {
    union {
        u32 present[kWarp];  // before the list is made: a bit for each expert
        u16 experts[kMaxPairs];
    };
    int count;
};

// The list at `offset` bytes in the block's dynamic shared memory.
DEVICE ExpertList& list_at(u32 offset) {
    extern __shared__ u8 dynamic_shared[];
    return *reinterpret_cast<ExpertList*>(dynamic_shared + offset);
}

// The scale of a token that does not have the expert: -0. present_scale keeps other scales from being -0.
constexpr float kAbsent = -0.f;
DEVICE bool is_absent(float scale) { return __float_as_uint(scale) == __float_as_uint(kAbsent); }
DEVICE float present_scale(float scale) { return scale == 0.f ? 0.f : scale; }

// Makes the list, by one warp.
DEVICE void list_experts(const ExpertIds& router, ExpertList& list) {
    u32* present = list.present;
    int lane = lane_of_warp();
    present[lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < router.pairs; first += 2 * kWarp) {
        int id[2] = {router.id_of(first + lane), router.id_of(first + kWarp + lane)};
        int expert[2] = {router.here(id[0]), router.here(id[1])};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (expert[i] != kNoExpert) atomicOr(&present[expert[i] / kWarp], 1u << expert[i] % kWarp);
    }
    __syncwarp();

    u32 word = present[lane];
    __syncwarp();
    int end = __popc(word);
#pragma unroll
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
        int before = __shfl_up_sync(kAllLanes, end, lanes);
        end += lane >= lanes ? before : 0;
    }
#pragma unroll 1
    for (int at = end - __popc(word); word; word &= word - 1) list.experts[at++] = lane * kWarp + __ffs(word) - 1;
    if (lane == kWarp - 1) list.count = end;
    __syncwarp();
}
