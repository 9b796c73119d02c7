// SwiGLU with quantization of a transposed (swap-AB) result: rows of a fragment are channels, its columns are tokens. A
// thread's values are pairs of neighbouring tokens; all math warps of the block share the groups of these tokens.
#pragma once
#include "device/fp8.cuh"
#include "device/fragment.cuh"
#include "device/ptx.cuh"
#include "epilogue/activation.cuh"
#include "pipeline/tile.cuh"

// Quantizes a pair of tokens to shared memory.
DEVICE void stage_pair(u32 pair, const float (&scale)[2], const float (&inverse)[2], u32 to_first, u32 to_second) {
    u16 codes = quantize_two(pair, scale, inverse);
    store_shared(to_first, u8(codes));
    store_shared(to_second, u8(codes >> 8));
}

// The largest magnitude of each token of a pair, of kCount of the thread's channels, over the channels of its warp.
template <int kCount>
DEVICE u32 warp_amax(const u32 (&pairs)[kCount]) {
    u32 amax = pairs[0] & kNoSigns;
#pragma unroll
    for (int i = 1; i < kCount; ++i) amax = max_u16x2(amax, pairs[i] & kNoSigns);
#pragma unroll
    for (int lanes = 4; lanes < kWarp; lanes *= 2) amax = max_u16x2(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
    return amax;
}

// The same over all warps, from shared memory; amax_at(warp) is the address of a warp's.
template <int kWarps, class AmaxAt>
DEVICE u32 block_amax(AmaxAt amax_at) {
    u32 amax = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) amax = max_u16x2(amax, load_shared(amax_at(warp)));
    return amax;
}

// The thread's channel of a slab, in a tile's group of channels: its two rows are the gate and the up projection of it.
template <int kSlabs>
DEVICE u32 channel_of_slab(int slab, int warp, int lane) {
    return (warp / 4 * kSlabs + slab) * 32 + warp % 4 * 8 + lane / 4;
}

// Activates, quantizes and stores a tile's group of channels: each warp has some of the channels, so the largest
// magnitudes are exchanged in shared memory, and codes are staged there. `out` is the kernel's Result.
template <int kTokens, int kMathWarps, int kSlabs, class SharedMemory, class Result>
DEVICE void store_quantized_transposed(SharedMemory shared, const Result& out, const Tile& tile, int barrier,
                                       const Fragment<kTokens> (&sum)[kSlabs]) {
    constexpr int kMathThreads = kMathWarps * kWarp, kBlockI = 128;
    int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = out.splits.group_of(tile);
    auto amax_at = [&](int from, int pair) { return shared.amax(from * (kFewRowsTile / 2) + pair); };
    u32 value[kTokens / 8][kSlabs];
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) value[i][slab] = out.activation.of_pair(sum[slab], i);
        u32 amax = warp_amax(value[i]);
        if (lane < 4) store_shared(amax_at(warp, i * 4 + lane), amax);
    }
    named_barrier(barrier, kMathThreads);
    const u32 first = shared.staging(fragment_column(threadIdx.x));
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
        u32 amax = block_amax<kMathWarps>([=](int from) { return amax_at(from, i * 4 + lane % 4); });
        float scale[2] = {group_scale(amax << 16), group_scale(amax & 0xFFFF0000)};
        float inverse[2] = {__frcp_rn(scale[0]), __frcp_rn(scale[1])};
        int token = i * 8 + fragment_column(threadIdx.x);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            u32 to = first + i * 8 * kBlockI + channel_of_slab<kSlabs>(slab, warp, lane);
            stage_pair(value[i][slab], scale, inverse, to, to + kBlockI);
        }
        if (warp == 0 && lane < 4) {
            float* scales = out.scales + i64(group) * scale_pitch(out.m) + tile.row + token;
            if (token < tile.rows) scales[0] = scale[0];
            if (token + 1 < tile.rows) scales[1] = scale[1];
        }
    }
    named_barrier(barrier, kMathThreads);
    for (int i = threadIdx.x; i < tile.rows * (kBlockI / 16); i += kMathThreads) {
        int token = i / (kBlockI / 16), chunk = i % (kBlockI / 16);
        *reinterpret_cast<uint4*>(out.q + i64(tile.row + token) * out.intermediate + group * kBlockI + chunk * 16) =
            load_shared_16(shared.staging(token) + chunk * 16);
    }
}
