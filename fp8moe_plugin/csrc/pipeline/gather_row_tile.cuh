// The producer of row tiles whose rows are gathered. TMA is too slow for single rows (25 cycles per box), so four
// producer warps copy the rows, swizzled as TMA would: each warp copies 32 rows, 16 bytes per lane, eight lanes per
// row. The first warp also loads the weights.
#pragma once
#include "pipeline/producer.cuh"
#include "pipeline/row_tile.cuh"
#include "pipeline/tile_queue.cuh"

constexpr int kRowChunks = kBlockK / 16, kRowsAtOnce = kWarp / kRowChunks, kCopies = kWarp / kRowsAtOnce;
static_assert(kRowsAtOnce == 4, "half of a swizzle atom");
constexpr u32 kNoRow = ~0u;

struct GatheredOperand {
    const uint4* values;  // e4m3 [T, K]
    const float* scales;  // [T, K / 128]
    const int* rows;      // the row of `values` for each row of the tiles
    int k_blocks;
};

// Where a thread's chunks start in `values`, in chunks of 16 bytes: `from` for row i * kRowsAtOnce + lane / 8 of its
// warp's 32 rows, `tail` for a row of the tail. It copies the scale at `scale`. kNoRow: past the tile.
struct GatheredRows {
    u32 from[kCopies], tail, scale;

    DEVICE GatheredRows(const GatheredOperand& in, const Tile& tile) {
        int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, chunk = lane % kRowChunks;
        auto row = [&](int i) { return i < tile.rows ? u32(in.rows[tile.row + i]) * in.k_blocks : kNoRow; };
        auto start = [&](u32 row) { return row == kNoRow ? kNoRow : row * kRowChunks + chunk; };
        scale = row(thread);
        tail = start(row(kBlockM + thread / kRowChunks));
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            from[i] = start(__shfl_sync(kAllLanes, scale, i * kRowsAtOnce + lane / kRowChunks));
    }
    // Every instruction counts: a K block takes no longer than issuing a few hundred of them.
    template <class SharedMemory>
    DEVICE void copy(SharedMemory shared, int stage, const GatheredOperand& in, int k) const {
        int thread = threadIdx.x % kWarpgroup, chunk = thread % kRowChunks, row = thread / kRowChunks;
        const uint4* values = in_registers(in.values + k * kRowChunks);
        u32 to = shared.tokens(stage, thread / kWarp * kWarp + row % kRowsAtOnce) + (chunk ^ row % kRowsAtOnce) * 16;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)  // odd i: the second half of a swizzle atom
            if (from[i] != kNoRow)
                copy_async_16((i % 2 ? to ^ kRowsAtOnce * 16 : to) + i * kRowsAtOnce * kBlockK, values + from[i]);
        if (tail != kNoRow) copy_async_16(shared.tokens(stage, kBlockM + row) + (chunk ^ row % 8) * 16, values + tail);
        const float* scales = in_registers(in.scales + k);
        if (scale != kNoRow) copy_async_4(shared.token_scale(stage, thread), scales + scale);
        if (tail != kNoRow && chunk == 0)
            copy_async_4(shared.token_scale(stage, kBlockM + row), scales + tail / kRowChunks);
    }
};

// Like load_row_tile, for four producer warps; the first one owns the queue.
template <class SharedMemory, int kStages, class Queue, class Loads>
DEVICE void gather_row_tile(SharedMemory shared, Ring<kStages>& ring, const GatheredOperand& in, const Tile& tile,
                            Queue& queue, bool first_warp, const Loads& weights) {
    const GatheredRows rows(in, tile);
    fill_stages<barrier_wait>(shared, ring, 0, in.k_blocks, [&](int k, int s, u32 full) {
        if (first_warp && lane_of_warp() == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(full, WeightTile<SharedMemory>::kBytes);
            weights.load({shared, s}, full, k);
            weights.load_scales({shared, s}, k);
        }
        rows.copy(shared, s, in, k);
        copy_async_arrive(full);
        if (first_warp) queue.prepare_next(k);
    });
}
