// SwiGLU with quantization of a transposed (swap-AB) result of many tokens, with a sum of the gate and one of the up
// projection (multiply_gate_and_up); otherwise as in swiglu_transposed.cuh. A scale is computed once, by a thread for
// each token, and rows of the staging area are swizzled, so that the tokens of a warp are in different banks.
#pragma once
#include "epilogue/swiglu_transposed.cuh"

template <int kCount>
struct TokenFactors : Once<kCount, 8, 16> {};  // of each token the scale, and its inverse

template <class SharedMemory>
DEVICE u32 staged_channel(SharedMemory shared, int token, u32 channel) {
    return shared.staging(token) + (channel / 16 ^ token / 2 % 8) * 16 + channel % 16;
}

template <int kTokens, int kMathWarps, class SharedMemory, class Result>
DEVICE void store_quantized_many_rows(SharedMemory shared, const Result& out, const Tile& tile, int barrier,
                                      const Fragment<kTokens> (&sum)[2]) {
    constexpr int kMathThreads = kMathWarps * kWarp, kBlockI = 128, kSlabs = 2;
    static_assert(kTokens <= kMathThreads, "a thread for each token");
    const int thread = not_in_advance(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int group = out.splits.group_of(tile);
    auto amax_at = [&](int from, int pair) { return shared.amax(from * (kTileTokens / 2) + pair); };
    u32 value[kTokens / 8][kSlabs];
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab)  // of which the thread has a row in both sums
            value[i][slab] = out.activation.of_pair(sum[0], sum[1], 2 * i + slab);
        const u32 amax = warp_amax(value[i]);
        if (lane < 4) store_shared(amax_at(warp, i * 4 + lane), amax);
    }
    named_barrier(barrier, kMathThreads);
    if (thread < kTokens) {
        const u32 pair = block_amax<kMathWarps>([=](int from) { return amax_at(from, thread / 2); });
        const float scale = group_scale(thread % 2 ? pair & 0xFFFF0000 : pair << 16);
        store_shared(shared.template at<TokenFactors>(thread),
                     make_uint2(__float_as_uint(scale), __float_as_uint(__frcp_rn(scale))));
        if (thread < tile.rows) out.scales[i64(group) * scale_pitch(out.m) + tile.row + thread] = scale;
    }
    named_barrier(barrier, kMathThreads);
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
        const int token = i * 8 + fragment_column(lane);
        const uint4 of_two = load_shared_16(shared.template at<TokenFactors>(token));
        const float scale[2] = {__uint_as_float(of_two.x), __uint_as_float(of_two.z)};
        const float inverse[2] = {__uint_as_float(of_two.y), __uint_as_float(of_two.w)};
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            const u32 to = staged_channel(shared, token, channel_of_slab<kSlabs>(slab, warp, lane));
            stage_pair(value[i][slab], scale, inverse, to, to + kBlockI);
        }
    }
    named_barrier(barrier, kMathThreads);
    for (int i = thread; i < tile.rows * (kBlockI / 16); i += kMathThreads) {
        const int token = i / (kBlockI / 16), channel = i % (kBlockI / 16) * 16;
        *reinterpret_cast<uint4*>(out.q + i64(tile.row + token) * out.intermediate + group * kBlockI + channel) =
            load_shared_16(staged_channel(shared, token, channel));
    }
}
