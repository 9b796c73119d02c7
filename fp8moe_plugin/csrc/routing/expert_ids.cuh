// The local experts of the (token, expert) pairs. A chunk is PAIRS_PER_CHUNK pairs, one per thread.
#pragma once
#include "device/common.cuh"

constexpr int kNoExpert = -1;
constexpr u32 kHigh = 1 << 16;  // 1 in the high half of a word of counts

struct ExpertIds {
    // int32 or int64 [tokens, topk - shared_expert], global expert ids; those outside [0, routed_experts) are ignored.
    const void* ids;
    const int* expert_map;  // int32 [routed_experts], the local expert or -1; null: global ids are local
    int ids_64;             // 1: ids are int64
    int shared_expert;      // 1: the last of a token's topk pairs is with expert routed_experts, which every token has
    int pairs, topk, routed_experts, num_experts;

    // kNoExpert for a pair whose expert is not on this rank, and past the last pair.
    DEVICE int expert_of(int pair) const { return here(id_of(pair)); }

    // The same in two parts, a load each, so that the loads of several pairs can be in flight together.
    DEVICE int id_of(int pair) const {
        if (pair >= pairs) return kNoExpert;
        if (shared_expert) {
            const int token = u32(pair) / u32(topk);
            if (pair == token * topk + topk - 1) return routed_experts;
            pair -= token;
        }
        const int* words = static_cast<const int*>(ids) + (ids_64 ? 2 * i64(pair) : pair);
        const int id = words[0], high = ids_64 ? words[1] : 0;  // words of an int64
        return high == 0 && id >= 0 && id < routed_experts ? id : kNoExpert;
    }
    DEVICE int here(int id) const {
        if (id == kNoExpert) return kNoExpert;
        const int expert = expert_map ? expert_map[id] : id;
        return expert >= 0 && expert < num_experts ? expert : kNoExpert;
    }
};
