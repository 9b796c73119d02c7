// Counters between two GEMMs that overlap: the first one counts the rows it has stored, which the second one reads.
#pragma once
#include "device/ptx.cuh"
#include "pipeline/tile_queue.cuh"

struct RowsDone {
    int* ready;    // [1 + row tiles * counters]: blocks that are done; of a row tile, columns that are done, and more
    int counters;  // of a row tile

    DEVICE int* of_tile(const Tile& tile) const { return ready + 1 + tile.row_tile * counters; }
    // Called by one thread, when all tiles of its block have been counted.
    DEVICE void block() const {
        if (!ready) return;
        __threadfence();
        atomicAdd(ready, 1);
    }
};

// The second one's producer waits until `parts` parts of a tile's rows are stored. A look takes a round trip to L2, as
// long as a tile of K 256, so that it stops looking once all blocks of the first one, as many as its own, are done.
struct RowsAwaited {
    RowsDone of;
    int parts, parts_of_a_block;  // expected counts: of a row tile, of a block
    bool all;

    DEVICE RowsAwaited(const RowsDone& of, int parts, int parts_of_a_block = 1)
        : of(of), parts(parts), parts_of_a_block(parts_of_a_block), all(!of.ready) {}
    DEVICE void wait(const Tile& tile) {
        if (all) return;
        all = load_acquire(of.ready) == parts_of_a_block * int(gridDim.x);
        if (!all)
            while (load_acquire(of.of_tile(tile)) < parts) __nanosleep(100);
        fence_proxy_async_global();
    }
};
