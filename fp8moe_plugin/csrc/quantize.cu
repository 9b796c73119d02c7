// Quantizes activations to e4m3, with a float32 scale per token and group of 128 channels.
//
// In:   x       bfloat16 [tokens, K], K = 128 * groups
//       slots   int32 [tokens, topk] (LAYOUT_PERMUTED only), the rows to which a token is copied; -1 for none
// Out:  q       e4m3 [rows, K]; rows = tokens, with LAYOUT_PERMUTED tokens * topk
//       scales  float32 [groups, rows], at scale_pitch(rows); with LAYOUT_ROW_MAJOR [rows, groups]
//
// UE8M0: 1 rounds scales up to powers of two.
// QUANTIZED, with LAYOUT_PERMUTED: x is e4m3 [tokens, K] with scales x_scales, float32 [tokens, groups], and is copied.
// With LAYOUT_K_MAJOR it is the first kernel of a dense layer, and waits for the previous kernel (PDL). With
// LAYOUT_ROW_MAJOR it overlaps earlier kernels (PDL), which must neither write x nor access q and scales.
// A half-warp quantizes a group, 16 bytes per lane, of some of the warp's tokens. With TOKENS_PER_WARP, eight, it has
// four loads in flight, and the tokens of a warp fill a 32-byte sector of K-major scales. Few tokens are quantized
// sooner by more warps: LAYOUT_K_MAJOR also takes FEW_TOKENS_PER_WARP, one for each half-warp.
#include "device/common.cuh"
#include "device/fp8.cuh"

#ifdef QUANTIZED
using Eight = uint2;  // channels of a token
#else
using Eight = uint4;
#endif

// LAYOUT_PERMUTED streams x, which leaves L2 to the copies: 20% faster at 8192 tokens. Otherwise plain loads are
// faster.
DEVICE Eight load_token(const Eight* x) { return LAYOUT == LAYOUT_PERMUTED ? __ldcs(x) : *x; }

template <int kTokensPerWarp>
DEVICE void quantize_tokens(const Eight* x, uint2* __restrict__ q, float* __restrict__ scales,
                            const int* __restrict__ slots, int tokens, int groups, int topk,
                            const float* __restrict__ x_scales) {
    constexpr int kTokensPerLane = kTokensPerWarp / (kWarp / kGroupLanes);
    const int warp = blockIdx.x * (THREADS / kWarp) + threadIdx.x / kWarp;
    const int group = warp % groups;
    const int warp_token = warp / groups * kTokensPerWarp;
    if (warp_token >= tokens) return;
    const int lane = threadIdx.x % kGroupLanes;
    const int first = warp_token + lane_of_warp() / kGroupLanes * kTokensPerLane;
    const auto position = [&](int row) { return (static_cast<size_t>(row) * groups + group) * kGroupLanes + lane; };

    // Load.
    Eight values[kTokensPerLane];
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i)
        values[i] = first + i < tokens ? load_token(&x[position(first + i)]) : Eight{};
#if LAYOUT == LAYOUT_PERMUTED
    int slot[kTokensPerLane];  // lane l holds the slot of each token's expert `expert + l`
    const auto load_slots = [&](int expert) {
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i)
            slot[i] = first + i < tokens && expert + lane < topk
                          ? slots[static_cast<size_t>(first + i) * topk + expert + lane]
                          : -1;
    };
    load_slots(0);
#endif

    // Quantize.
    uint2 codes[kTokensPerLane];
    float scale[kTokensPerLane];
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
#ifdef QUANTIZED
        codes[i] = values[i];
        scale[i] = first + i < tokens ? x_scales[static_cast<size_t>(first + i) * groups + group] : 0.0f;
#else
        const float s = group_scale(group_max(magnitude_bits(values[i])));
        float v[8];
        unpack_eight(values[i], v);
        codes[i] = quantize_eight(v, s);
        scale[i] = s;
#endif
    }

    // Store.
#if LAYOUT == LAYOUT_PERMUTED
    float* const group_scales = scales + group * scale_pitch(tokens * topk);
    for (int expert = 0; expert < topk; expert += kGroupLanes) {
        if (expert > 0) load_slots(expert);
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) {
            if (slot[i] >= 0) group_scales[slot[i]] = scale[i];
            for (int j = 0; j < min(kGroupLanes, topk - expert); ++j) {
                const int row = __shfl_sync(kAllLanes, slot[i], j, kGroupLanes);
                if (row >= 0) q[position(row)] = codes[i];
            }
        }
    }
#else
    float scale_of_lane = scale[0];  // lane i stores the scale of token i, in one store
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
        if (lane == i) scale_of_lane = scale[i];
        if (first + i < tokens) q[position(first + i)] = codes[i];
    }
    if (lane < kTokensPerLane && first + lane < tokens)
        scales[LAYOUT == LAYOUT_ROW_MAJOR ? static_cast<size_t>(first + lane) * groups + group
                                          : group * scale_pitch(tokens) + first + lane] = scale_of_lane;
#endif
#if LAYOUT == LAYOUT_ROW_MAJOR
    if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();  // not all blocks: waiting ones would occupy their SMs
#endif
}

// x is not __restrict__: the compiler could then move its loads above the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize(const Eight* x, uint2* __restrict__ q, float* __restrict__ scales, const int* __restrict__ slots,
             int tokens, int groups, int topk, int tokens_per_warp, const float* __restrict__ x_scales) {
#if LAYOUT == LAYOUT_K_MAJOR
    wait_for_previous_kernel();
#endif
    let_next_kernel_start();
    if (LAYOUT == LAYOUT_K_MAJOR && tokens_per_warp == FEW_TOKENS_PER_WARP)
        quantize_tokens<FEW_TOKENS_PER_WARP>(x, q, scales, slots, tokens, groups, topk, x_scales);
    else
        quantize_tokens<TOKENS_PER_WARP>(x, q, scales, slots, tokens, groups, topk, x_scales);
}
