// The sum of a token's expert rows, weighted by the router, in float32 and in the order of its top-k columns.
#pragma once
#include "device/common.cuh"

constexpr int kRowsInFlight = 8;

// Sums 16 bytes of the rows, at `vector` of `vectors`. Columns from `routed` on, a shared expert's, have weight 1; the
// weights of the others are multiplied by `routed_scale`. A slot of -1 has no row. Waits for the previous kernel (PDL)
// before it reads `rows`, and no earlier.
DEVICE uint4 weighted_sum(const uint4* rows, const int* slots, const float* weights, int vector, int vectors, int topk,
                          int routed, float routed_scale) {
    float sum[8] = {};
    for (int begin = 0; begin < topk; begin += kRowsInFlight) {
        int slot[kRowsInFlight];
        float weight[kRowsInFlight];
        uint4 row[kRowsInFlight];
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
            slot[j] = begin + j < topk ? slots[begin + j] : -1;
            weight[j] = begin + j < routed ? weights[begin + j] : 1.0f;
        }
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j)  // in a loop of its own it takes 6 registers less
            weight[j] = __fmul_rn(weight[j], begin + j < routed ? routed_scale : 1.0f);
        wait_for_previous_kernel();  // as late as possible: of the inputs only `rows` come from that kernel
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j)
            if (slot[j] >= 0) row[j] = rows[static_cast<size_t>(slot[j]) * vectors + vector];
#pragma unroll
        for (int j = 0; j < kRowsInFlight; ++j) {
            if (slot[j] < 0) continue;
            float value[8];
            unpack_eight(row[j], value);
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = __fadd_rn(sum[c], __fmul_rn(weight[j], value[c]));
        }
    }
    return make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]), pack_bf16x2(sum[4], sum[5]),
                      pack_bf16x2(sum[6], sum[7]));
}

// Whether a token has a row; by a warp.
DEVICE bool any_row(const int* slots, int topk) {
    bool any = false;
    for (int column = lane_of_warp(); column < topk; column += kWarp) any |= slots[column] >= 0;
    return __ballot_sync(kAllLanes, any) != 0;
}
