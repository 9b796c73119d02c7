// Sums the expert rows of each token, weighted by the router, in float32 and in the order of its top-k columns. With
// shared_expert = 1 the last column is the shared expert's, whose weight is 1.
//
// In:   rows     bfloat16 [R, H], H = 8 * vectors
//       slots    int32 [T, topk], the row of each (token, expert) pair; -1 if the expert is not on this rank
//       weights  float32 [T, topk - shared_expert], which are multiplied by routed_scale
// Out:  out      bfloat16 [T, H]; zeros for a token without rows
//
// A thread sums 16 bytes of one token; blocks_per_token thread blocks share a token. Grid: T * blocks_per_token.
// With PDL it starts while the second GEMM, which writes `rows`, ends.
#include "device/common.cuh"

constexpr int kRowsInFlight = 8;

// Inputs are not __restrict__: the compiler could then move their loads above the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const uint4* rows, const int* slots, const float* weights, uint4* __restrict__ out, int vectors, int topk,
            int shared_expert, float routed_scale) {
    const int blocks_per_token = ceil_div(vectors, THREADS);
    const int token = blockIdx.x / blocks_per_token;
    const int vector = blockIdx.x % blocks_per_token * THREADS + threadIdx.x;
    if (vector >= vectors) return;
    slots += static_cast<size_t>(token) * topk;
    const int routed = topk - shared_expert;
    weights += static_cast<size_t>(token) * routed;

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
    out[static_cast<size_t>(token) * vectors + vector] =
        make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]), pack_bf16x2(sum[4], sum[5]),
                   pack_bf16x2(sum[6], sum[7]));
}
