// Swap-AB: 64 rows of weights are the M operand of wgmma and a few tokens the N operand, which can be as narrow as 8,
// so that less is wasted on padding. Rows of a fragment are rows of the weights, its columns are tokens.
#pragma once
#include "device/fragment.cuh"
#include "device/wgmma.cuh"
#include "pipeline/ring.cuh"

// The scales of a thread's tokens times that of the weights; token_scale(offset) is the address of the scale of the
// token at that offset from the thread's first.
template <int kTokens, class TokenScale>
DEVICE void read_scales(float (&scale)[kTokens / 4], float weight_scale, TokenScale token_scale) {
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) scale[i] = load_shared_float(token_scale(column_offset(i))) * weight_scale;
}

template <int kTokens>
DEVICE void add_scaled(const Fragment<kTokens>& product, const float (&scale)[kTokens / 4], Fragment<kTokens>& sum) {
#pragma unroll
    for (int e = 0; e < kTokens / 2; ++e) sum[e] += scale[column_index(e)] * product[e];
}
