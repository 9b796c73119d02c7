// Adds the ranks' sums of each token of this rank, in float32 and in the order of the ranks.
//
// In:   window  its sums, see window.cuh; only those of ranks that have an expert of the token are there
//       ids, owners  as in push_tokens.cu
// Out:  out     bfloat16 [tokens, H], H = 8 * vectors; zeros for a token without experts
//
// A thread adds 16 bytes of one token. Grid: tokens * ceil(vectors / THREADS). It waits for the previous kernel (PDL)
// before it does anything.
#include "ranks/window.cuh"
#include "routing/token_ranks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    add_sums(const Window* window, const void* ids, const int* owners, uint4* __restrict__ out, int ids_64, int tokens,
             int rows, int topk, int experts, int vectors) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int parts = ceil_div(vectors, THREADS), token = blockIdx.x / parts;
    const int vector = blockIdx.x % parts * THREADS + threadIdx.x;
    const ExpertIds owner{ids, owners, ids_64, 0, tokens * topk, topk, experts, window->ranks};
    const u32 needed = ranks_of_token(owner, token);
    if (vector >= vectors) return;
    const uint4* sums = window->in_window<uint4>(window->rank, window->sums) + i64(token) * vectors + vector;

    uint4 part[MAX_RANKS];  // all loads in flight
#pragma unroll
    for (int rank = 0; rank < MAX_RANKS; ++rank)
        if (needed >> rank & 1) part[rank] = sums[i64(rank) * rows * vectors];
    float sum[8] = {};
#pragma unroll
    for (int rank = 0; rank < MAX_RANKS; ++rank) {
        if (!(needed >> rank & 1)) continue;
        float value[8];
        unpack_eight(part[rank], value);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = __fadd_rn(sum[c], value[c]);
    }
    out[i64(token) * vectors + vector] = make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                                                    pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7]));
}
