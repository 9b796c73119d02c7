// Sums the expert rows of each token as combine.cu does, and stores the sum of another rank's token into that rank's
// window. Ends when the sums of all ranks have arrived here, see window.cuh.
//
// In:   rows   bfloat16 [R, H], H = 8 * vectors
//       slots  int32 [N * rows_per_rank, topk], the row of each pair; -1 if the expert is not on this rank.
//              Null: the rows are sums already, one for each token.
//       window  its ids and weights
// Out:  sums of the windows, at [rank, token]; nothing for a token without rows
//
// A thread sums 16 bytes of one token; blocks take parts of THREADS * 16 bytes in turn. With PDL it starts while the
// second GEMM, which writes `rows`, ends.
#include "epilogue/weighted_sum.cuh"
#include "ranks/window.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, kSumBlocks)
    push_sums(const uint4* rows, const int* slots, Window* window, int rows_per_rank, int vectors, int topk,
              float routed_scale) {
    let_next_kernel_start();
    const int parts = ceil_div(vectors, THREADS), all = window->ranks * rows_per_rank * parts;
    const float* weights = window->in_window<float>(window->rank, window->weights);
    for (int i = blockIdx.x; i < all; i += gridDim.x) {
        const int source = window->peer(i / parts % window->ranks), t = i / parts / window->ranks;
        const int vector = i % parts * THREADS + threadIdx.x;
        const i64 token = i64(source) * rows_per_rank + t;
        uint4 sum;
        bool any = true;
        if (slots) {
            any = weighted_sum(rows, slots + token * topk, weights + token * topk, vector, vectors, topk, topk,
                               routed_scale, sum);
        } else {
            wait_for_previous_kernel();
            if (vector < vectors) sum = rows[token * vectors + vector];
        }
        if (!any || vector >= vectors) continue;
        uint4* const sums = window->in_window<uint4>(source, window->sums);
        store_to_peer(sums + (i64(window->rank) * rows_per_rank + t) * vectors + vector, sum);
    }
    wait_for_previous_kernel();
    finish_push(window);
}
