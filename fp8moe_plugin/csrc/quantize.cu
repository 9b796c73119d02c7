// Quantizes activations, see quantize.cuh.
//
// In:   x       bfloat16 [tokens, K], K = 128 * groups
//       slots   int32 [tokens, topk] (LAYOUT_PERMUTED only), the rows that get a token; -1 for none
// Out:  q       e4m3 [rows, K];  rows = tokens, with LAYOUT_PERMUTED tokens * topk
//       scales  float32 [groups, rows], at scale_pitch(rows); with LAYOUT_ROW_MAJOR [rows, groups]
//
// UE8M0: 1 rounds scales up to powers of two.
// With LAYOUT_ROW_MAJOR it is launched early and waits last: no kernel beside it may touch what it reads or writes.
#include "quantize.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void quantize(const uint4* __restrict__ x, uint2* __restrict__ q,
                                                                float* __restrict__ scales,
                                                                const int* __restrict__ slots, int tokens, int groups,
                                                                int topk) {
    let_next_kernel_start();
    const int warp = blockIdx.x * (THREADS / kWarp) + threadIdx.x / kWarp;
    if (!has_tokens(warp, tokens, groups)) return;
    quantize_of_warp(warp, x, q, scales, slots, tokens, groups, topk);
#if LAYOUT == LAYOUT_ROW_MAJOR
    if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();  // not all: they would keep their places
#endif
}
