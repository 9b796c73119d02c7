// Sums the expert rows of each token, weighted by the router, in float32 and in the order of its top-k columns.
//
// In:   rows     bfloat16 [R, H], H = 8 * vectors
//       slots    int32 [T, topk], the row of each (token, expert) pair; -1 if the expert is not on this rank
//       weights  float32 [T, weight_columns], which are multiplied by routed_scale; a further column, a shared
//                expert's, has weight 1
// Out:  out      bfloat16 [T, H]; zeros for a token without rows
//
// A thread sums 16 bytes of one token; blocks_per_token thread blocks share a token. Grid: T * blocks_per_token.
// With PDL it starts while the second GEMM, which writes `rows`, ends.
#include "epilogue/weighted_sum.cuh"

// Inputs are not __restrict__: the compiler could then move their loads above the wait.
extern "C" __global__ void __launch_bounds__(THREADS, kSumBlocks)
    combine(const uint4* rows, const int* slots, const float* weights, uint4* __restrict__ out, int vectors, int topk,
            int weight_columns, float routed_scale) {
    const int blocks_per_token = ceil_div(vectors, THREADS);
    const int token = blockIdx.x / blocks_per_token;
    const int vector = blockIdx.x % blocks_per_token * THREADS + threadIdx.x;
    slots += static_cast<size_t>(token) * topk;
    weights += static_cast<size_t>(token) * weight_columns;
    uint4 sum;
    weighted_sum(rows, slots, weights, vector, vectors, topk, weight_columns, routed_scale, sum);
    if (vector < vectors) out[static_cast<size_t>(token) * vectors + vector] = sum;
}
