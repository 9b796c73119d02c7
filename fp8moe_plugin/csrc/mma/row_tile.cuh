// grouped_gemm.cu and gate_up.cu: their math warpgroups.
#pragma once
#include "device/wgmma.cuh"
#include "pipeline/row_tile_stages.cuh"

using Accumulator = Fragment<kHalfN>;

// Of a tail, 64 rows of B of each half by 16 rows of A, transposed: a thread holds rows lane/4 and lane/4 + 8 of B,
// rows 8i + lane%4*2 and the next of the tail.
using Tail = float[kTailRows / 2];

DEVICE void add_tail(SharedMemory shared, int s, int row, float b_scale, Tail& product, Tail& sum) {
    wgmma_results_ready(product);
#pragma unroll
    for (int i = 0; i < kTailRows / 2; ++i)  // scales read here and not before: registers are scarce while wgmma runs
        sum[i] += load_shared_float(shared.a_scale(s, row + i / 4 * 8 + i % 2)) * b_scale * product[i];
}

// 64 rows by kWidth columns of kCount halves, from a block of rows, a half, and a column of each half on; and the tail.
template <int kCount, int kWidth, bool kHasTail>
DEVICE void multiply_tile(SharedMemory shared, Rings& rings, int k_blocks, const Tile& tile, int row_block,
                          int first_half, int column, Fragment<kWidth> (&sum)[kCount], Tail (&tail)[kHalves]) {
    int first = GATHER ? 0 : ActivationScales::offset(tile.row), tail_row = first + kBlockM + threadIdx.x % 4 * 2;
    int row = first + row_block * kWarpgroupM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < kCount; ++half)
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sum[half][i] = 0.f;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kTailRows / 2; ++i) tail[half][i] = 0.f;

    rings.keep_b(tile, k_blocks);
    for (int k = 0; k < k_blocks; ++k, rings.a.advance(), rings.b.advance()) {
        int s = rings.a.stage, b = KEEP_B ? rings.b.stage : s;
        barrier_wait(shared.full(s), rings.a.phase);
        if (GATHER) fence_proxy_async();  // the copies of A are ordinary writes
        float a_scale[2] = {load_shared_float(shared.a_scale(s, row)), load_shared_float(shared.a_scale(s, row + 8))};
#pragma unroll
        for (int half = 0; half < kCount; ++half) {
            Fragment<kWidth> product;
            Tail tail_product;
            wgmma_fence();
            wgmma_issue(product, shared.a(s, row_block * kWarpgroupM),
                        shared.b(b, first_half + half) + column * kBlockK);
            if (kHasTail)
                wgmma_issue(tail_product, shared.b(b, half) + row_block * kWarpgroupM * kBlockK, shared.a(s, kBlockM));
            wgmma_commit();
            float b_scale = load_shared_float(shared.b_scale(b, first_half + half));
            float scale[2] = {a_scale[0] * b_scale, a_scale[1] * b_scale};
            wgmma_wait();
            wgmma_results_ready(product);
            if (kHasTail) add_tail(shared, s, tail_row, b_scale, tail_product, tail[half]);
            if (half == kCount - 1) release(shared, s);
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) sum[half][i] += scale[i / 2 % 2] * product[i];
        }
    }
}

// A warpgroup without rows only keeps the ring turning.
DEVICE void skip_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks) {
    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        barrier_wait(shared.full(ring.stage), ring.phase);
        release(shared, ring.stage);
    }
}
