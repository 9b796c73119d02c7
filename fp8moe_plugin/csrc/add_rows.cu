// Sums the expert rows of each token of this rank as combine.cu does, where GEMM 2 has stored them in this rank's
// window.
//
// In:   window  bfloat16 [tokens, topk, H] in place of its sums, see window.cuh; only rows of experts that a rank has
//               are there
//       ids, owners  as in push_tokens.cu
//       weights  float32 [tokens, topk], which are multiplied by routed_scale
// Out:  out     bfloat16 [tokens, H], H = 8 * vectors; zeros for a token without experts
//
// A thread sums 16 bytes of one token. Grid: tokens * ceil(vectors / THREADS).
#include "epilogue/weighted_sum.cuh"
#include "ranks/window.cuh"
#include "routing/expert_ids.cuh"

struct PairsOfToken {
    ExpertIds owner;
    int first;

    DEVICE int operator[](int column) const {
        return owner.expert_of(first + column) == kNoExpert ? -1 : first + column;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, kSumBlocks)
    add_rows(const Window* window, const void* ids, const int* owners, const float* weights, uint4* __restrict__ out,
             int ids_64, int tokens, int topk, int experts, int vectors, float routed_scale) {
    const int parts = ceil_div(vectors, THREADS), token = blockIdx.x / parts;
    const int vector = blockIdx.x % parts * THREADS + threadIdx.x;
    const ExpertIds owner{ids, owners, ids_64, 0, tokens * topk, topk, experts, window->ranks};
    const uint4* rows = window->in_window<uint4>(window->rank, window->sums);
    uint4 sum;
    weighted_sum(rows, PairsOfToken{owner, token * topk}, weights + i64(token) * topk, vector, vectors, topk, topk,
                 routed_scale, sum);
    if (vector < vectors) out[i64(token) * vectors + vector] = sum;
}
