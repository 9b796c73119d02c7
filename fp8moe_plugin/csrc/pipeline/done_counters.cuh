// Done counters, with which GEMM 2 of the experts overlaps GEMM 1: GEMM 1 counts what it has stored, and GEMM 2
// waits for the rows of each tile.
#pragma once
#include "device/ptx.cuh"
#include "pipeline/tile.cuh"

struct DoneCounters {
    int* counters;  // [1 + row tiles * per_tile]: finished blocks; then, of each row tile, first its stored columns
    int per_tile;

    DEVICE int* of_tile(const Tile& tile) const { return counters + 1 + tile.row_tile * per_tile; }
    // By one thread, after all tiles of its block have been counted.
    DEVICE void count_block() const {
        if (counters) count_released(counters);
    }
};

// The producer of GEMM 2 waits until a tile's rows are stored. A poll is a round trip to L2, which takes as long as a
// tile of K 256, so it stops polling once all thread blocks of GEMM 1 are done. GEMM 2 has kBlocks times as many.
template <int kBlocks>
struct AwaitedRowsOf {
    DoneCounters done;
    int counts_per_tile, counts_per_block;  // final values of the counters
    bool all;

    DEVICE AwaitedRowsOf(const DoneCounters& done, int counts_per_tile, int counts_per_block = 1)
        : done(done), counts_per_tile(counts_per_tile), counts_per_block(counts_per_block), all(!done.counters) {}
    DEVICE void wait(const Tile& tile) {
        if (all) return;
        all = load_acquire(done.counters) == counts_per_block * (int(gridDim.x) / kBlocks);
        if (!all)
            while (load_acquire(done.of_tile(tile)) < counts_per_tile) __nanosleep(100);
        fence_proxy_async_global();
    }
};
using AwaitedRows = AwaitedRowsOf<1>;
