// grouped_gemm.cu and gate_up.cu: their producer, one warp that fills the ring by TMA.
#pragma once
#include "pipeline/row_tile_stages.cuh"
#include "pipeline/rows_done.cuh"

struct WeightScales {
    const float* data;
    int next_half;  // from the scale of one half to that of the next

    DEVICE WeightScales(const Operands& in, const Tile& tile) {
        int rows = (in.n + kHalfN - 1) / kHalfN, row = tile.column * (kTileN / kHalfN);
        data = in.b_scales + i64(tile.expert * rows + row) * in.k_blocks;
        next_half = (kSwiglu ? rows / 2 : row + 1 < rows) * in.k_blocks;  // a tile may pass N
    }
    DEVICE void copy(SharedMemory shared, int stage, int k) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
            copy_async_4(shared.b_scale(stage, half), data + half * next_half + k);
    }
};

DEVICE void load_b(SharedMemory shared, int stage, u32 full, const Operands& in, const Tile& tile, int k) {
    int row = tile.expert * in.n + tile.column * kTileN;
    tma_load(shared.b(stage, 0), in.b, full, k * kBlockK, row);
    if (kSwiglu) tma_load(shared.b(stage, 1), in.b, full, k * kBlockK, row + in.n / 2);
}

DEVICE void load_tile(SharedMemory shared, Rings& rings, const Operands& in, Queue& queue, RowsAwaited& a_rows) {
    const Tile tile = queue.tile();
    a_rows.wait(tile);
    const WeightScales b_scales(in, tile);
    const bool kept = rings.keep_b(tile, in.k_blocks);
    const bool narrow = KEEP_B || in.k_blocks <= kNarrowBoxes;
    const TensorMap* a = narrow ? in.a_narrow : in.a;
    int box = narrow ? kTailRows : kWarpgroupM, rows = narrow ? tile.rows : min(tile.rows, kBlockM);
    rows = (rows + box - 1) / box * box;
    int tail_rows = !narrow && tile.rows > kBlockM ? kTailRows : 0;
    u32 a_scale_bytes = ActivationScales::bytes(tile);
    u32 bytes = (rows + tail_rows) * kBlockK + (kept ? 0 : kHalves * SharedMemory::kBytesB) + a_scale_bytes;
    auto load = [&](int s, u32 full, int k, const float* a_scale) {
        int b = KEEP_B ? rings.b.stage : s;  // in the lane that loads
        if (!kept) load_b(shared, b, full, in, tile, k);
#pragma unroll 1
        for (int row = 0; row < rows; row += box) tma_load(shared.a(s, row), a, full, k * kBlockK, tile.row + row);
        if (tail_rows > 0) tma_load(shared.a(s, kBlockM), in.a_narrow, full, k * kBlockK, tile.row + kBlockM);
        bulk_load(shared.a_scale(s, 0), a_scale, full, a_scale_bytes);
        if (!kept) b_scales.copy(shared, b, k);
        rings.b.advance();
    };
    fill_stages(shared, rings.a, queue, tile, in.a_scales, in.k_blocks, bytes, load);
}

DEVICE void load_tiles(SharedMemory shared, Rings& rings, const Operands& in, Queue& queue) {
    RowsAwaited a_rows({in.ready, 1}, kMathWarpgroups * in.k_blocks, kMathWarpgroups);  // of a column, of a block
    while (queue.index < queue.total) load_tile(shared, rings, in, queue, a_rows);
}
