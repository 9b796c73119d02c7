// gate_up.cu: the producers of GATHER. A warp copies 32 rows of A, eight lanes a row; the first warp also loads B.
#pragma once
#include "pipeline/load_row_tile.cuh"

constexpr int kRowChunks = kBlockK / 16, kRowsAtOnce = 32 / kRowChunks, kCopies = 32 / kRowsAtOnce;
static_assert(kRowsAtOnce == 4, "half of a swizzle atom");
constexpr u32 kNoRow = ~0u;

// Where in `gathered` the chunks start that a thread copies, in chunks of 16 bytes: of rows i * kRowsAtOnce + lane / 8
// of its warp's 32, and of a row of the tail; and the row whose scale it copies. kNoRow past the tile.
struct GatheredRows {
    u32 from[kCopies], tail, scale;

    DEVICE GatheredRows(const Operands& in, const Tile& tile) {
        int thread = threadIdx.x % 128, lane = thread % 32, chunk = lane % kRowChunks;
        auto row = [&](int i) { return i < tile.rows ? u32(in.a_rows[tile.row + i]) * in.k_blocks : kNoRow; };
        auto start = [&](u32 row) { return row == kNoRow ? kNoRow : row * kRowChunks + chunk; };
        scale = row(thread);
        tail = start(row(kBlockM + thread / kRowChunks));
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            from[i] = start(__shfl_sync(kAllLanes, scale, i * kRowsAtOnce + lane / kRowChunks));
    }
    // Every instruction counts: a step of 128 K is over before a warp has issued a few hundred.
    DEVICE void copy(SharedMemory shared, int stage, const Operands& in, int k) const {
        int thread = threadIdx.x % 128, chunk = thread % kRowChunks, row = thread / kRowChunks;
        const uint4* a = in_registers(in.gathered + k * kRowChunks);
        u32 to = shared.a(stage, thread / 32 * 32 + row % kRowsAtOnce) + (chunk ^ row % kRowsAtOnce) * 16;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)  // every other kRowsAtOnce rows are the second half of a swizzle atom
            if (from[i] != kNoRow)
                copy_async_16((i % 2 ? to ^ kRowsAtOnce * 16 : to) + i * kRowsAtOnce * kBlockK, a + from[i]);
        if (tail != kNoRow) copy_async_16(shared.a(stage, kBlockM + row) + (chunk ^ row % 8) * 16, a + tail);
        const float* scales = in_registers(in.a_scales.data + k);
        if (scale != kNoRow) copy_async_4(shared.a_scale(stage, thread), scales + scale);
        if (tail != kNoRow && chunk == 0)
            copy_async_4(shared.a_scale(stage, kBlockM + row), scales + tail / kRowChunks);
    }
};

DEVICE void gather_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, const Tile& tile, Queue& queue,
                        bool first_warp) {
    const WeightScales b_scales(in, tile);
    const GatheredRows rows(in, tile);
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (first_warp && threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(shared.full(s), kHalves * SharedMemory::kBytesB);
            load_b(shared, s, shared.full(s), in, tile, k);
            b_scales.copy(shared, s, k);
        }
        rows.copy(shared, s, in, k);
        copy_async_arrive(shared.full(s));
        if (first_warp) queue.step(k);
    }
}

DEVICE void gather_tiles(SharedMemory shared, Ring<kStages>& ring, const Operands& in, Queue& queue, bool first_warp) {
    while (true) {
        const Tile tile = share_tile(shared.gathered_tile(), kProducerBarrier, queue, first_warp);
        if (tile.rows == 0) break;
        gather_tile(shared, ring, in, tile, queue, first_warp);
    }
    copy_async_wait();  // PTX promises no arrivals of threads that have exited
}
