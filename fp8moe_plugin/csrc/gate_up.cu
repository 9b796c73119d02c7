// The first GEMM of experts with its activation, for many rows an expert: D = quantized SiLU(gate) * up, e4m3
// [rows, I] with a scale per row and 128 channels, as silu_mul_quant.cu, where [gate, up] is A[rows, K] @
// B[expert, N, K]^T and N = 2I, gate rows first.
//
// It is the GEMM of grouped_gemm.cu; the halves of a tile are 128 channels of the gate and the same 128 of the other
// projection, so that the group of a scale never leaves a warpgroup.
//
// GATHER: row i of A is row a_rows[i] of the matrix `gathered`, whose scales are row-major. TMA cannot do that (a box
// of one row takes 25 cycles), so the four producer warps copy 16 bytes a lane, swizzled as TMA would have done.
//
// It counts in `ready` what it has stored of each row tile; the second GEMM may start while this one ends. With `ready`
// null nobody asks.
#define BLOCK_N 256
#define SWIGLU 1
#include "epilogue/swiglu_rows.cuh"
#include "pipeline/gather_row_tile.cuh"
#include "pipeline/load_row_tile.cuh"

template <int kWidth, bool kHasTail>
DEVICE void compute_rows(SharedMemory shared, Rings& rings, int k_blocks, const Quantized& out, const Tile& tile,
                         int warpgroup, int row_block, int column, int& buffer, Completion& complete) {
    Fragment<kWidth> sum[2];
    Tail tail[kHalves];
    multiply_tile<2, kWidth, kHasTail>(shared, rings, k_blocks, tile, row_block, 0, column, sum, tail);
    store_quantized<kWidth>(shared, out, tile, warpgroup, row_block, buffer, complete, sum[0], sum[1]);
    if (kHasTail) store_quantized_tail(shared, out, tile, warpgroup, buffer, tail[0], tail[kHalves - 1]);
}

DEVICE void compute_tile(SharedMemory shared, Rings& rings, int k_blocks, const Quantized& out, const Tile& tile,
                         int warpgroup, int& buffer, Completion& complete) {
    if (tile.rows > kBlockM)
        compute_rows<kHalfN, true>(shared, rings, k_blocks, out, tile, warpgroup, warpgroup, 0, buffer, complete);
    else if (tile.rows > kWarpgroupM)
        compute_rows<kHalfN, false>(shared, rings, k_blocks, out, tile, warpgroup, warpgroup, 0, buffer, complete);
    else  // few rows: each warpgroup takes half of the channels instead
        compute_rows<kHalfN / 2, false>(shared, rings, k_blocks, out, tile, warpgroup, 0, warpgroup * kHalfN / 2,
                                        buffer, complete);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gate_up(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_narrow_map,
            const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap d_map, const float* a_scales,
            int a_scale_expert_stride, int a_scale_k_stride, const float* b_scales, const uint4* gathered,
            const int* a_rows, u8* d, float* d_scales, int* ready, const int4* table, int* num_tiles, int m, int n,
            int k) {
    let_next_kernel_start();
    SharedMemory shared{dynamic_shared_address()};
    init_barriers(shared, kStages, kFullArrivals, 4 * kMathWarpgroups);

    int warpgroup = warp_uniform(threadIdx.x / 128), k_blocks = k / kBlockK;
    ActivationScales scales{a_scales, a_scale_expert_stride, a_scale_k_stride};
    Operands in{&a_map, &a_narrow_map, &b_map, gathered, a_rows, scales, b_scales, nullptr, n, k_blocks};
    Quantized out{&d_map, d, d_scales, n / 2, m};
    Rings rings;
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        bool first_warp = threadIdx.x / 32 == 4 * kMathWarpgroups;
        if (GATHER || first_warp) {
            Queue queue(table, num_tiles, 0, m, (n + BLOCK_N - 1) / BLOCK_N, k_blocks);
            if (GATHER)
                gather_tiles(shared, rings.a, in, queue, first_warp);
            else
                load_tiles(shared, rings, in, queue);
            if (first_warp) {
                load_end(shared, rings.a, kFullArrivals);
                queue.finish();
            }
        }
    } else {
        increase_registers<kMathRegisters>();
        int buffer = 0;
        Completion complete{ready};
        while (true) {
            barrier_wait(shared.full(rings.a.stage), rings.a.phase);
            Tile tile = published_tile(shared.tile(rings.a.stage));
            if (tile.rows == 0) break;
            compute_tile(shared, rings, k_blocks, out, tile, warpgroup, buffer, complete);
        }
        complete.finish(shared, warpgroup);
    }
}
