// Split K within a cluster, for some channels of a few tokens: each thread block sends its partial sums of a token to
// the shared memory of the block that stores the token, which adds them up in the order of the blocks.
#pragma once
#include "device/fragment.cuh"
#include "device/ptx.cuh"

constexpr int kMostSplits = MAX_CLUSTER_SPLITS;

// Of kChannels channels, 64 per warpgroup. Each of a block's teams of warps has partial sums of all of them.
template <int kTokens, int kChannels, int kTeams = 1>
struct ClusterSum {
    static constexpr int kTeamThreads = kChannels * 2, kMathThreads = kTeams * kTeamThreads;
    static constexpr u32 kBytesPart = kChannels * 4;  // partial sums of a token
    static constexpr u32 kBytes = (kTokens + kMostSplits - 1) * kTeams * kBytesPart;

    u32 parts, received;  // in shared memory: kBytes, and an mbarrier
    int splits, split, tokens, reciprocal;

    DEVICE ClusterSum(u32 parts, u32 received, int splits, int split, int tokens)
        : parts(parts), received(received), splits(splits), split(split), tokens(tokens) {
        reciprocal = (2048 + splits - 1) / splits;
    }
    // Block t % splits stores token t, in round t / splits. Avoids the division; exact up to 128 tokens and 8 splits.
    DEVICE int round_of(int token) const { return token * reciprocal >> 11; }
    DEVICE int stored() const { return (tokens - split + splits - 1) / splits; }
    DEVICE u32 part(int round, int from) const { return parts + (round * splits * kTeams + from) * kBytesPart; }

    // By one thread, before the blocks of the cluster meet.
    DEVICE void init() const {
        barrier_init(received, 1);
        barrier_init_fence();
        barrier_arrive_expect(received, stored() * splits * kTeams * kBytesPart);
    }

    // The blocks of the cluster meet: all threads call arrive(), then wait(). A single block skips this, as its math
    // warps would wait for its producers.
    DEVICE void arrive() const {
        if (splits > 1) cluster_arrive();
    }
    DEVICE void wait() const {
        if (splits > 1) cluster_wait();
    }

    // Sends the sums, once. Rows of the fragment are channels, columns tokens; a thread's two channels are adjacent.
    DEVICE void send(const Fragment<kTokens>& sum) const {
        int lane = lane_of_warp(), at = (threadIdx.x % kTeamThreads / kWarp * 8 + lane / 4) * 8;
        int from = split * kTeams + threadIdx.x / kTeamThreads;
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
            int token = fragment_column(lane) + column_offset(i), e = element_at(0, i);
            if (token >= tokens) continue;
            int round = round_of(token), to = token - round * splits;
            float2 pair = make_float2(sum[e], sum[e + 2]);
            if (splits > 1)
                store_async(in_block(part(round, from) + at, to), pair, in_block(received, to));
            else  // st.async needs a launch with clusters
                store_shared(part(round, from) + at, make_uint2(__float_as_uint(pair.x), __float_as_uint(pair.y)));
        }
    }

    // Adds up and stores to bfloat16 [tokens, n], from `channel` on, two channels at a time; by the threads that sent.
    DEVICE void store(u16* out, int n, int channel) const {
        constexpr int kPairs = kChannels / 2;
        if (splits > 1)
            barrier_wait(received, 0);
        else
            named_barrier(1, kMathThreads);
        for (int i = threadIdx.x; i < stored() * kPairs; i += kMathThreads) {
            int round = i / kPairs, token = round * splits + split, pair = i % kPairs;
            u32 at =
                (pair / 8 * 8 + pair % 4 * 2) * 8 + pair / 4 % 2 * 4;  // of the first channel; the second is 8 bytes on
            float first = 0.f, second = 0.f;
#pragma unroll 4
            for (int from = 0; from < splits * kTeams; ++from) {
                first += load_shared_float(part(round, from) + at);
                second += load_shared_float(part(round, from) + at + 8);
            }
            if (channel + pair * 2 < n)
                *reinterpret_cast<u32*>(out + i64(token) * n + channel + pair * 2) = pack_bf16x2(first, second);
        }
    }
};
