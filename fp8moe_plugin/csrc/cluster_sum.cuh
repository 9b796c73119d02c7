// Sums of 64 channels of up to 128 tokens, over the blocks of a cluster, of which each has a part of K: each sends what
// it has of a token to the shared memory of the block that stores it, where the parts are added up in their order.
#pragma once
#include "ptx.cuh"

constexpr int kMaxSplits = 8;  // CLUSTER_SPLITS of plan.py
constexpr int kBlockN = 64;    // channels of a cluster

// `kGroups` warpgroups of each block have sums of their own: parts come in the order of blocks, then of warpgroups.
template <int kTokens, int kGroups>
struct ClusterSum {
    static constexpr u32 kBytesPart = kBlockN * 4;  // of a token
    static constexpr u32 kBytes = (kTokens + kMaxSplits - 1) * kGroups * kBytesPart;

    u32 parts, received;  // shared memory: of `kBytes`, and a barrier
    int splits, split, tokens, reciprocal;

    DEVICE ClusterSum(u32 parts, u32 received, int splits, int split, int tokens)
        : parts(parts), received(received), splits(splits), split(split), tokens(tokens) {
        reciprocal = (2048 + splits - 1) / splits;
    }
    // Token t is the t / splits th that block t % splits stores. Exact for 128 tokens and 8 splits, without a division.
    DEVICE int round_of(int token) const { return token * reciprocal >> 11; }
    DEVICE int stored() const { return (tokens - split + splits - 1) / splits; }
    DEVICE u32 part(int round, int number) const {
        return parts + (round * splits * kGroups + number) * kBytesPart;
    }

    // By one thread, before the cluster's blocks meet.
    DEVICE void init() const {
        barrier_init(received, 1);
        barrier_init_fence();
        barrier_arrive_expect(received, stored() * splits * kGroups * kBytesPart);
    }

    // Of a thread as wgmma leaves them: channels lane/4 and lane/4 + 8 of its warp's 16, of tokens 8i + lane%4*2 and
    // the next, at [4i] and [4i + 1], the second channel's 2 behind. A thread's two channels go side by side.
    DEVICE void send(int group, const float (&sum)[kTokens / 2]) const {
        int lane = lane_of_warp(), at = (threadIdx.x / kWarp % 4 * 8 + lane / 4) * 8;
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
            int token = i / 2 * 8 + lane % 4 * 2 + i % 2, e = i / 2 * 4 + i % 2;
            int round = round_of(token), to = token - round * splits;
            if (token < tokens)
                store_async(in_block(part(round, split * kGroups + group) + at, to), make_float2(sum[e], sum[e + 2]),
                            in_block(received, to));
        }
    }

    // To bfloat16 [tokens, n], from `channel` on; by the first `threads` of the block, two channels at a time.
    DEVICE void store(int threads, u16* out, int n, int channel) const {
        constexpr int kPairs = kBlockN / 2;
        barrier_wait(received, 0);
        for (int i = threadIdx.x; i < stored() * kPairs; i += threads) {
            int round = i / kPairs, token = round * splits + split, pair = i % kPairs;
            u32 at = (pair / 8 * 8 + pair % 4 * 2) * 8 + pair / 4 % 2 * 4;  // of the first; that of the next is 8 on
            float first = 0.f, second = 0.f;
#pragma unroll 4
            for (int number = 0; number < splits * kGroups; ++number) {
                first += load_shared_float(part(round, number) + at);
                second += load_shared_float(part(round, number) + at + 8);
            }
            if (channel + pair * 2 < n)
                *reinterpret_cast<u32*>(out + i64(token) * n + channel + pair * 2) = pack_bf16x2(first, second);
        }
    }
};
