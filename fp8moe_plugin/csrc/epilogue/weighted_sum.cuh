// The sum of a token's expert rows, weighted by the router, in float32 and in the order of its top-k columns.
#pragma once
#include "device/common.cuh"

// Rows that a thread loads at once, and blocks of 128 threads that then fit on an SM. Where a rank has few experts of
// a token, more blocks help more than more rows.
constexpr int kRowsInFlight = 4, kSumBlocks = 10;

// Sums 16 bytes of the rows of a token, at `vector` of `vectors`. Called by all lanes of a warp with the same token,
// also by those whose `vector` is not below `vectors`: they load slots, and get no sum. Columns from `weight_columns`
// on, a shared expert's, have weight 1; the weights of the others are multiplied by `routed_scale`. `slots[column]` is
// the row of each column, -1 for none. Waits for the previous kernel (PDL) before it reads `rows`, and no earlier.
// Returns whether the token has rows, the same on all lanes.
template <class Slots>
DEVICE bool weighted_sum(const uint4* rows, Slots slots, const float* weights, int vector, int vectors, int topk,
                         int weight_columns, float routed_scale, uint4& out) {
    float sum[8] = {};
    bool any = false;
    for (int begin = 0; begin < topk; begin += kWarp) {
        const int column = begin + lane_of_warp();
        const int slot = column < topk ? slots[column] : -1;
        const float weight = column < weight_columns ? __fmul_rn(weights[column], routed_scale) : 1.0f;
        u32 left = __ballot_sync(kAllLanes, slot >= 0);
        any |= left != 0;
        wait_for_previous_kernel();  // as late as possible: of the inputs only `rows` come from that kernel
        while (left) {
            uint4 row[kRowsInFlight];
            float weight_of[kRowsInFlight];
            const u32 present = left;
#pragma unroll
            for (int j = 0; j < kRowsInFlight; ++j) {
                const int from = left ? __ffs(left) - 1 : 0;
                const size_t at = __shfl_sync(kAllLanes, slot, from);
                weight_of[j] = __shfl_sync(kAllLanes, weight, from);
                if (left && vector < vectors) row[j] = rows[at * vectors + vector];
                left &= left - 1;
            }
            const int count = __popc(present ^ left);
#pragma unroll
            for (int j = 0; j < kRowsInFlight; ++j) {
                if (j >= count) break;
                float value[8];
                unpack_eight(row[j], value);
#pragma unroll
                for (int c = 0; c < 8; ++c) sum[c] = __fadd_rn(sum[c], __fmul_rn(weight_of[j], value[c]));
            }
        }
    }
    out = make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]), pack_bf16x2(sum[4], sum[5]),
                     pack_bf16x2(sum[6], sum[7]));
    return any;
}
