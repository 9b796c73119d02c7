// Split K over the blocks of a cluster, for some channels of a few tokens: each block sends its part of a token's sums
// to the shared memory of the block that stores that token, which adds the parts up in the order of the blocks.
#pragma once
#include "device/fragment.cuh"
#include "device/ptx.cuh"

constexpr int kMostSplits = CLUSTER_SPLITS;

// Of `kChannels` channels, 64 a warpgroup.
template <int kTokens, int kChannels>
struct ClusterSum {
    static constexpr int kMathThreads = kChannels * 2;
    static constexpr u32 kBytesPart = kChannels * 4;  // of a token
    static constexpr u32 kBytes = (kTokens + kMostSplits - 1) * kBytesPart;

    u32 parts, received;  // shared memory: of `kBytes`, and a barrier
    int splits, split, tokens, reciprocal;

    DEVICE ClusterSum(u32 parts, u32 received, int splits, int split, int tokens)
        : parts(parts), received(received), splits(splits), split(split), tokens(tokens) {
        reciprocal = (2048 + splits - 1) / splits;
    }
    // Token t is the t / splits th that block t % splits stores. Exact for 128 tokens and 8 splits, without a division.
    DEVICE int round_of(int token) const { return token * reciprocal >> 11; }
    DEVICE int stored() const { return (tokens - split + splits - 1) / splits; }
    DEVICE u32 part(int round, int from) const { return parts + (round * splits + from) * kBytesPart; }

    // By one thread, before the cluster's blocks meet.
    DEVICE void init() const {
        barrier_init(received, 1);
        barrier_init_fence();
        barrier_arrive_expect(received, stored() * splits * kBytesPart);
    }

    // The blocks of a cluster meet: all threads `arrive`, all `wait`. Of a block alone they would wait for one another
    // instead, those who compute for those who load.
    DEVICE void arrive() const {
        if (splits > 1) cluster_arrive();
    }
    DEVICE void wait() const {
        if (splits > 1) cluster_wait();
    }

    // Once. Rows of the fragment are channels, columns are tokens; a thread's two channels go side by side.
    DEVICE void send(const Fragment<kTokens>& sum) const {
        int lane = lane_of_warp(), at = (threadIdx.x / kWarp * 8 + lane / 4) * 8;
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
            int token = fragment_column(lane) + column_offset(i), e = element_at(0, i);
            if (token >= tokens) continue;
            int round = round_of(token), to = token - round * splits;
            float2 pair = make_float2(sum[e], sum[e + 2]);
            if (splits > 1)
                store_async(in_block(part(round, split) + at, to), pair, in_block(received, to));
            else  // no cluster: the GPU refuses
                store_shared(part(round, split) + at, make_uint2(__float_as_uint(pair.x), __float_as_uint(pair.y)));
        }
    }

    // To bfloat16 [tokens, n], from `channel` on, two channels at a time; by the threads that have sent.
    DEVICE void store(u16* out, int n, int channel) const {
        constexpr int kPairs = kChannels / 2;
        if (splits > 1)
            barrier_wait(received, 0);
        else
            named_barrier(1, kMathThreads);
        for (int i = threadIdx.x; i < stored() * kPairs; i += kMathThreads) {
            int round = i / kPairs, token = round * splits + split, pair = i % kPairs;
            u32 at = (pair / 8 * 8 + pair % 4 * 2) * 8 + pair / 4 % 2 * 4;  // of the first; that of the next is 8 on
            float first = 0.f, second = 0.f;
#pragma unroll 4
            for (int from = 0; from < splits; ++from) {
                first += load_shared_float(part(round, from) + at);
                second += load_shared_float(part(round, from) + at + 8);
            }
            if (channel + pair * 2 < n)
                *reinterpret_cast<u32*>(out + i64(token) * n + channel + pair * 2) = pack_bf16x2(first, second);
        }
    }
};
