// D[rows, N] = A[rows, K] @ B[expert, N, K]^T, e4m3 with scales per 1x128 of A and 128x128 of B, for many rows an
// expert.
//
// A tile is 128 rows of A by BLOCK_N rows of B. One producer thread fills a ring of stages, each 128 along K: A and B
// by TMA, A's scales by a bulk copy, B's by 4-byte copies. Two math warpgroups take 64 rows of A each; the product over
// 128 K of each half of 128 columns lands in one accumulator, which is scaled and added in float32 before the next
// (DeepGEMM's two-level accumulation). Rows of a tile that belong to the next expert are computed and not stored.
//
// Up to 16 rows more, the tail of a tile, are multiplied the other way round: 64 of each 128 rows of B are the 64-row
// operand of each warpgroup, the tail is the narrow one. A tile of their own would load all of B once more.
//
// KEEP_B, for K of one or two steps: tiles come in runs, most of them of the same columns, whose B stays where it is.
//
// As the second GEMM of experts it shares a tile table and `ready` with the first one, gate_up.cu, and may start while
// that one ends. With `ready` null it follows as any kernel does.
#include "epilogue/store_rows.cuh"
#include "pipeline/load_row_tile.cuh"

struct Result {
    const TensorMap* map;
    void* d;
    const void* c;
    int n;
};

template <int kCount, bool kHasTail>
DEVICE void compute_rows(SharedMemory shared, Rings& rings, int k_blocks, const Result& out, const Tile& tile,
                         int warpgroup, int row_block, int first_half) {
    Accumulator sum[kCount];
    Tail tail[kHalves];
    multiply_tile<kCount, kHalfN, kHasTail>(shared, rings, k_blocks, tile, row_block, first_half, 0, sum, tail);
    int row = tile.row + row_block * kWarpgroupM, rows = min(kWarpgroupM, tile.rows - row_block * kWarpgroupM);
    int column = tile.column * BLOCK_N + first_half * kHalfN;
    if (OUTPUT == OUTPUT_BF16)
        store_staged<kCount>(shared, out.map, static_cast<u16*>(out.d), out.n, row, rows, column, warpgroup, sum);
    else
#pragma unroll
        for (int half = 0; half < kCount; ++half)
            store_direct(out.d, out.c, out.n, row, rows, column + half * kHalfN, sum[half]);
    if (!kHasTail) return;
    row = tile.row + kBlockM, rows = tile.rows - kBlockM, column += warpgroup * kWarpgroupM;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        if (OUTPUT == OUTPUT_BF16)
            store_transposed<kTailRows>(shared.tail_staging(warpgroup, half), warpgroup, static_cast<u16*>(out.d),
                                        out.n, row, rows, column + half * kHalfN, tail[half]);
        else
            store_tail_direct(out.d, out.c, out.n, row, rows, column + half * kHalfN, tail[half]);
    }
}

DEVICE void compute_tile(SharedMemory shared, Rings& rings, int k_blocks, const Result& out, const Tile& tile,
                         int warpgroup) {
    if (tile.rows > kBlockM)
        compute_rows<kHalves, true>(shared, rings, k_blocks, out, tile, warpgroup, warpgroup, 0);
    else if (tile.rows > warpgroup * kWarpgroupM && (kHalves == 1 || tile.rows > kWarpgroupM))
        compute_rows<kHalves, false>(shared, rings, k_blocks, out, tile, warpgroup, warpgroup, 0);
    else if (kHalves == 2)  // few rows: each warpgroup takes a half of the columns instead
        compute_rows<1, false>(shared, rings, k_blocks, out, tile, warpgroup, 0, warpgroup);
    else
        skip_tile(shared, rings.a, k_blocks);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_narrow_map,
                 const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap d_map,
                 const float* a_scales, int a_scale_expert_stride, int a_scale_k_stride, const float* b_scales, void* d,
                 const void* c, int* ready, const int4* table, int* num_tiles, int m, int n, int k) {
    SharedMemory shared{dynamic_shared_address()};
    init_barriers(shared, kStages, kFullArrivals, 4 * kMathWarpgroups);

    int warpgroup = warp_uniform(threadIdx.x / 128), k_blocks = k / kBlockK;
    ActivationScales scales{a_scales, a_scale_expert_stride, a_scale_k_stride};
    Operands in{&a_map, &a_narrow_map, &b_map, nullptr, nullptr, scales, b_scales, ready, n, k_blocks};
    Result out{&d_map, d, c, n};
    Rings rings;
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kMathWarpgroups) {
            int column_tiles = (n + BLOCK_N - 1) / BLOCK_N;
            Queue queue(table, num_tiles, 1, m, column_tiles, k_blocks, ready);
            load_tiles(shared, rings, in, queue);
            load_end(shared, rings.a, kFullArrivals);
            if (ready) wait_for_previous_kernel();  // who follows this one follows both
            queue.finish();
        }
    } else {
        increase_registers<kMathRegisters>();
        while (true) {
            barrier_wait(shared.full(rings.a.stage), rings.a.phase);
            Tile tile = published_tile(shared.tile(rings.a.stage));
            if (tile.rows == 0) break;
            compute_tile(shared, rings, k_blocks, out, tile, warpgroup);
        }
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
