// A tile table has one entry (expert, row_begin, row_end, first) per tile: the rows of the tile's whole group, and the
// index of the group's first tile. `row_tiles` of fp8moe_plugin/plan/sm90/tiles.py cuts groups the same way.
//
// Kernels that make a table write:
//
//       table      int4 [capacity]; only the first *num_tiles entries
//       num_tiles  int32 [NUM_TILES_LENGTH], see write_num_tiles
//       done_counters  int32 [1 + capacity * counters_per_tile], zero up to the last tile's
//
// With `done_counters`, groups with tails come first: their tiles take longer, and thread blocks of a GEMM should
// finish at about the same time.
#pragma once
#include "device/common.cuh"

constexpr int kManyRowsTile = MANY_ROWS_TILE, kTailRows = TAIL_ROWS, kFewRowsTile = FEW_ROWS_TILE;
constexpr int kWideFewRowsTile = WIDE_FEW_ROWS_TILE;
constexpr int kSharedTile = 2 * kManyRowsTile;  // of two blocks, without a tail

// How a group is cut: into tiles of block_m rows, the last one shorter; unless the remainder fits into tails of the
// other tiles, up to kTailRows each, which cost far less than a tile that loads the weights once more.
struct RowTiles {
    static constexpr int kLongest = kSharedTile;

    int rows, block_m, tail, over, count;

    DEVICE RowTiles(int rows, int block_m) : rows(rows), block_m(block_m) {
        tail = block_m == kManyRowsTile ? kTailRows : 0;
        // A division by constants takes a shift or a multiplication. A further size of tiles needs its constant here.
        int full = block_m == kWideFewRowsTile ? u32(rows) / kWideFewRowsTile
                                               : u32(rows) / (block_m == kFewRowsTile  ? kFewRowsTile
                                                              : block_m == kSharedTile ? kSharedTile
                                                                                       : kManyRowsTile),
            rest = rows - full * block_m;
        over = rest <= full * tail ? rest : 0;
        count = full + (rest > over);
    }
    DEVICE int begin(int tile) const { return tile * block_m + min(tile * tail, over); }
    DEVICE int size(int tile) const { return min(begin(tile + 1), rows) - begin(tile); }
};

// Writes the `tiles` entries of a group, from `first` on; by one thread, as most groups have few.
DEVICE void write_group(int4* table, int first, int tiles, int expert, int row_begin, int row_end) {
#pragma unroll 1
    for (int i = first; i < first + tiles; ++i) table[i] = make_int4(expert, row_begin, row_end, first);
}

// Appends the tiles of a window of groups, one group per thread, in the order of the threads; an empty group has none.
// `written` tiles are in the table already; returns their new number. All threads of the block call it.
template <int kThreads>
DEVICE int append_tiles(int4* table, int written, int expert, int row_begin, int row_end, int block_m) {
    const int count = RowTiles(row_end - row_begin, block_m).count;
    int before[1], tiles[1];
    exclusive_scan({count}, kThreads / kWarp, before, tiles);
    write_group(table, written + before[0], count, expert, row_begin, row_end);
    __syncthreads();  // between scans
    return written + tiles[0];
}

// Writes the number of tiles, and zeroes the two pairs of counters with which GEMMs claim them; by one thread.
DEVICE void write_num_tiles(int* num_tiles, int tiles) {
#pragma unroll
    for (int i = 0; i < NUM_TILES_LENGTH; ++i) num_tiles[i] = i == 0 ? tiles : 0;
}
