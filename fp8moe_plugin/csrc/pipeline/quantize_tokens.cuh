// Quantizes a thread block's part of K of all tokens of a small batch to shared memory, swizzled as wgmma reads it.
#pragma once
#include "device/fp8.cuh"
#include "device/ptx.cuh"

// Each half-warp has a group of 128 channels, 16 bytes per lane. The constructor starts the loads.
template <int kTokens, int kMostSteps, int kThreads>
struct TokenQuantizer {
    static constexpr int kAtOnce = kThreads / kGroupLanes / kMostSteps, kRounds = kTokens / kAtOnce;
    uint4 values[kRounds];

    DEVICE static int lane() { return threadIdx.x % kGroupLanes; }
    DEVICE static int step() { return threadIdx.x / kGroupLanes % kMostSteps; }
    DEVICE static int first_token() { return threadIdx.x / kGroupLanes / kMostSteps; }

    // `x`: bfloat16 [tokens, 128 * k_blocks]; the block has its `steps` K blocks from `first_step` on. Null: it loads
    // nothing.
    DEVICE TokenQuantizer(const uint4* x, int tokens, int k_blocks, int first_step, int steps) {
        if (!x || step() >= steps) return;
        x += (i64(first_token()) * k_blocks + first_step + step()) * kGroupLanes + lane();
#pragma unroll
        for (int round = 0; round < kRounds; ++round)
            if (first_token() + round * kAtOnce < tokens) values[round] = x[round * kAtOnce * k_blocks * kGroupLanes];
    }
    // To `rows` of 128 bytes and to `scales`, kTokens for each K block. Returns when all threads have stored their
    // groups.
    DEVICE void store(u32 rows, u32 scales, int tokens, int steps, int barrier) const {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            int token = first_token() + round * kAtOnce;
            if (round * kAtOnce >= tokens) break;  // for all lanes of the warp
            float scale = group_scale(group_max(magnitude_bits(values[round]))), v[8];
            unpack_eight(values[round], v);
            if (token >= tokens || step() >= steps) continue;
            u32 to = rows + (step() * kTokens + token) * 128 + (lane() / 2 ^ token % 8) * 16 + lane() % 2 * 8;
            store_shared(to, quantize_eight(v, scale));
            if (lane() == 0) store_shared(scales + (step() * kTokens + token) * 4, __float_as_uint(scale));
        }
        fence_proxy_async();
        named_barrier(barrier, kThreads);
    }
};
