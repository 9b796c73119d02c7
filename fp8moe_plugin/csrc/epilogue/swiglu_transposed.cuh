// SwiGLU with quantization of a transposed (swap-AB) result, the tail of gate_up.cu: rows of a fragment are channels,
// its columns are tokens. A thread's values are pairs of neighbouring tokens; all math warps share the groups of these
// tokens.
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
