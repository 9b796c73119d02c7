// The tiles of kernels that decode weights. Decoding 256 rows takes longer than multiplying them by 128 tokens, so the
// two blocks of a cluster divide the weights where there are more tokens.
#pragma once
#include "device/decoding.cuh"
#include "pipeline/producer.cuh"
#include "pipeline/row_tile.cuh"
#include "pipeline/tile_queue.cuh"

constexpr int kColumnsOfTile = 2, kDecoderWarps = 4, kTilesAhead = 2;
constexpr int kTileReaders = kBlocksOfTile * (1 + kDecoderWarps) + 1;  // warps of both blocks

template <int kCount>
struct TilesAhead : Once<kCount, 16, 16> {};
template <int kCount>
struct TileThere : Once<kCount, 8, 8> {};  // its bytes
template <int kCount>
struct TileRead : Once<kCount, 8, 8> {};  // in block 0

DEVICE int rank_of_block() { return blockIdx.x % kBlocksOfTile; }

// A tile of both blocks: up to 256 tokens by two columns. With more than 128 tokens, or where there is no second
// column, the blocks split the weights: of one column after the other each has one chunk of each step. Otherwise each
// has both chunks of a column of its own. A block has all tokens in any case.
struct OwnTiles {
    bool split;
    int count;
    Tile tile;  // the first; the second one has the next column

    DEVICE OwnTiles(const Tile& both, int columns) : tile(both) {
        tile.column *= kColumnsOfTile;
        split = splits_weights(tile, columns);
        count = split ? min(columns - tile.column, kColumnsOfTile) : 1;
        if (!split) tile.column += rank_of_block();
    }
    // `tile`: a block's, in any of the columns that both have.
    DEVICE static bool splits_weights(const Tile& tile, int columns) {
        static_assert(kColumnsOfTile == 2, "the second column of two is odd");
        return tile.rows > kBlockM || (tile.column | 1) >= columns;
    }
};

// The number of tiles of single blocks into which a kernel with `columns` columns divides the rows of `both`.
DEVICE int tiles_of_rows(const Tile& both, int columns) {
    return both.rows > kBlockM ? kBlocksOfTile * columns : columns + columns % kColumnsOfTile;
}

// Where a split tile's tokens behind the first 128 are in a stage: in place of the other block's chunk. `chunk`: this
// block's.
template <class SharedMemory>
DEVICE u32 further_tokens(SharedMemory shared, int stage, int chunk, int row) {
    return shared.weights(stage, (chunk ^ 1) * kHalfN + row - kBlockM);
}

// By one thread, before init_barriers.
template <class SharedMemory>
DEVICE void init_passing(SharedMemory shared) {
    for (int i = 0; i < kTilesAhead; ++i) {
        barrier_init(shared.template at<TileThere>(i), 1);
        barrier_arrive_expect(shared.template at<TileThere>(i), sizeof(int4));
        barrier_init(shared.template at<TileRead>(i), kTileReaders);
    }
}

// The tiles on their way from the owner of the queue, which is ahead, to the other warps of both blocks.
struct PassedTiles {
    u32 passed = 0;  // a Ring takes one register more

    // By the owner, to both blocks.
    template <class SharedMemory>
    DEVICE void pass(SharedMemory shared, const Tile& tile) {
        wait_by_warp(shared.template at<TileRead>(slot()), phase() ^ 1);
        const int rank = lane_of_warp();
        if (rank < kBlocksOfTile)
            store_async(in_block(shared.template at<TilesAhead>(slot()), rank), published(tile),
                        in_block(shared.template at<TileThere>(slot()), rank));
        ++passed;
    }
    // By the owner, after the last tile: until all have been read, as its block must not end before.
    template <class SharedMemory>
    DEVICE void finish(SharedMemory shared) {
#pragma unroll
        for (int i = 0; i < kTilesAhead; ++i, ++passed) wait_by_warp(shared.template at<TileRead>(slot()), phase() ^ 1);
    }
    // kExpects: by one of the warps of each block.
    template <bool kExpects = false, class SharedMemory>
    DEVICE Tile receive(SharedMemory shared) {
        barrier_wait(shared.template at<TileThere>(slot()), phase());
        const Tile tile = published_tile(shared.template at<TilesAhead>(slot()));
        __syncwarp();
        if (lane_of_warp() == 0) {
            if (kExpects) barrier_arrive_expect(shared.template at<TileThere>(slot()), sizeof(int4));
            barrier_arrive_in_cluster(in_block(shared.template at<TileRead>(slot()), 0));
        }
        ++passed;
        return tile;
    }

   private:
    DEVICE u32 slot() const { return passed % kTilesAhead; }
    DEVICE u32 phase() const { return passed / kTilesAhead % 2; }
};
