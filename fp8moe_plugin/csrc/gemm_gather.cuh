// grouped_gemm.cu: the producers of GATHER. A warp copies 32 rows of A, eight lanes a row; the first warp also loads B.
#pragma once
#include "gemm_load.cuh"

constexpr int kRowChunks = kBlockK / 16, kRowsAtOnce = 32 / kRowChunks;
constexpr u32 kNoRow = ~0u;

// Where rows of a tile start in `gathered`, in chunks of 16 bytes; kNoRow past the tile. Thread i holds row i for its
// warp and the row of the tail that it copies a chunk of.
struct GatheredRows {
    u32 row, tail;

    DEVICE GatheredRows(const Operands& in, const Tile& tile) {
        auto start_of = [&](int i) {
            return i < tile.rows ? u32(in.a_rows[tile.row + i]) * in.k_blocks * kRowChunks : kNoRow;
        };
        row = start_of(threadIdx.x % 128);
        tail = start_of(kBlockM + threadIdx.x % 128 / kRowChunks);
    }
    DEVICE static void copy_chunk(SharedMemory shared, int stage, const Operands& in, int k, int to, u32 from) {
        int chunk = threadIdx.x % kRowChunks;
        if (from != kNoRow)
            copy_async_16(shared.a(stage, to) + (chunk ^ to % 8) * 16, in.gathered + (from + k * kRowChunks + chunk));
    }
    DEVICE static void copy_scale(SharedMemory shared, int stage, const Operands& in, int k, int to, u32 from) {
        if (from != kNoRow) copy_async_4(shared.a_scale(stage, to), in.a_scales.data + (from / kRowChunks + k));
    }
    DEVICE void copy(SharedMemory shared, int stage, const Operands& in, int k) const {
        int thread = threadIdx.x % 128, group = thread % 32 / kRowChunks;
#pragma unroll
        for (int i = 0; i < 32; i += kRowsAtOnce)
            copy_chunk(shared, stage, in, k, thread / 32 * 32 + i + group, __shfl_sync(kAllLanes, row, i + group));
        copy_chunk(shared, stage, in, k, kBlockM + thread / kRowChunks, tail);
        copy_scale(shared, stage, in, k, thread, row);
        if (thread % kRowChunks == 0) copy_scale(shared, stage, in, k, kBlockM + thread / kRowChunks, tail);
    }
};

// The first warp hands the tile to the others through shared memory.
DEVICE Tile share_tile(SharedMemory shared, const TileQueue<kBlockM>& queue, bool first_warp) {
    named_barrier(kProducerBarrier, 128);  // all have read the tile before
    if (first_warp && threadIdx.x % 32 == 0) publish_tile(shared.gathered_tile(), queue.tile());
    named_barrier(kProducerBarrier, 128);
    return published_tile(shared.gathered_tile());
}

DEVICE void gather_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, const Tile& tile,
                        TileQueue<kBlockM>& queue, bool first_warp) {
    const WeightScales b_scales(in, tile);
    const GatheredRows rows(in, tile);
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (first_warp && threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(shared.full(s), kHalves * SharedMemory::kBytesB);
            load_b(shared, s, in, tile, k);
            b_scales.copy(shared, s, k);
        }
        rows.copy(shared, s, in, k);
        copy_async_arrive(shared.full(s));
        if (first_warp) queue.step(k);
    }
}

DEVICE void gather_tiles(SharedMemory shared, Ring<kStages>& ring, const Operands& in, TileQueue<kBlockM>& queue,
                         bool first_warp) {
    while (true) {
        const Tile tile = share_tile(shared, queue, first_warp);
        if (tile.rows == 0) break;
        gather_tile(shared, ring, in, tile, queue, first_warp);
    }
    copy_async_wait();  // PTX promises no arrivals of threads that have exited
}
