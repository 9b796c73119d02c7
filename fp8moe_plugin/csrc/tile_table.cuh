// A tile table: one entry (expert, row_begin, row_end, first) a tile, where the rows are those of the tile's whole
// group and `first` is the index of the group's first tile. plan.py cuts groups the same way.
#pragma once
#include "common.cuh"

constexpr int kTailRows = 16;

// How a group is cut: tiles of block_m rows, the last one shorter; unless what is over fits into tails of the others,
// up to kTailRows each, which cost far less than a tile that loads the weights once more.
struct RowTiles {
    static constexpr int kBlockMOfTails = 128;  // only these tiles have tails
    static constexpr int kLongest = kBlockMOfTails + kTailRows;

    int rows, block_m, tail, over, count;

    DEVICE RowTiles(int rows, int block_m) : rows(rows), block_m(block_m) {
        tail = block_m == kBlockMOfTails ? kTailRows : 0;
        int full = rows / block_m, rest = rows - full * block_m;
        over = rest <= full * tail ? rest : 0;
        count = full + (rest > over);
    }
    DEVICE int begin(int tile) const { return tile * block_m + min(tile * tail, over); }
    DEVICE int size(int tile) const { return min(begin(tile + 1), rows) - begin(tile); }
};

// Appends the tiles of kThreads groups, one a thread, in the order of the threads; an empty group has none.
// `written` tiles are in the table already; returns how many there are then. All threads of the CTA call it.
template <int kThreads>
DEVICE int append_tiles(int4* table, int written, int expert, int row_begin, int row_end, int block_m) {
    static_assert((kThreads & (kThreads - 1)) == 0, "the search halves its step down to one");
    __shared__ int4 groups[kThreads];
    int tiles;
    const int before = exclusive_scan<kThreads>(RowTiles(row_end - row_begin, block_m).count, tiles);
    groups[threadIdx.x] = make_int4(expert, row_begin, row_end, written + before);
    __syncthreads();

    for (int tile = written + threadIdx.x; tile < written + tiles; tile += kThreads) {
        int group = 0;  // becomes the last whose first tile is not behind this one; never an empty one
#pragma unroll
        for (int step = kThreads / 2; step > 0; step /= 2)
            if (groups[group + step].w <= tile) group += step;
        table[tile] = groups[group];
    }
    __syncthreads();  // the next call overwrites groups
    return written + tiles;
}

// How many tiles there are, and two pairs of counters with which GEMMs hand them out.
DEVICE void finish_table(int* num_tiles, int tiles) {
    if (threadIdx.x < 5) num_tiles[threadIdx.x] = threadIdx.x == 0 ? tiles : 0;
}

// Writes the tiles of `groups` groups in order, those of groups with a tail first; `rows_of(group)` gives a group's
// first row and the row behind its last one. All threads of the only CTA that does call it.
//
// Out:  table      int4 [capacity]; only the first *num_tiles entries are written
//       num_tiles  int32 [5], see finish_table
//       ready      int32 [1 + capacity * tile_counters], zero up to the last tile's
template <int kThreads, class RowsOf>
DEVICE void write_table(int4* table, int* num_tiles, int* ready, int tile_counters, int groups, int block_m,
                        RowsOf rows_of) {
    const bool tails = block_m == RowTiles::kBlockMOfTails;
    int tiles = 0;
    for (int tailed = tails; tailed >= 0; --tailed) {  // the longer tiles first, so that blocks finish closer together
        for (int window = 0; window < groups; window += kThreads) {
            const int group = window + threadIdx.x;
            const int2 rows = group < groups ? rows_of(group) : make_int2(0, 0);
            const bool now = !tails || (RowTiles(rows.y - rows.x, block_m).over > 0) == tailed;
            tiles = append_tiles<kThreads>(table, tiles, group, rows.x, now ? rows.y : rows.x, block_m);
        }
    }
    for (int i = threadIdx.x; i <= tiles * tile_counters; i += kThreads) ready[i] = 0;
    finish_table(num_tiles, tiles);
}
