// Which output tiles a thread block computes, and in which order; the table of row tiles is in tile_table.cuh.
#pragma once
#include "pipeline/tile.cuh"

// The tiles of a thread block, for its producer warp. The row tiles of an expert are consecutive, one column after the
// other: blocks that start consecutive tiles at about the same time read a tile of weights from device memory once, and
// then from L2. Where an expert has more row tiles than stay in L2, bands of them take turns with the columns.
//
// How a block gets its next tile, or with kTilesAtOnce its next few consecutive ones:
//
//     counters  K blocks            next tile
//     none      any                 the gridDim.x-th after this one
//     given     more than 6         claimed 6 K blocks before the end of this one (kClaimAhead)
//     given     6 or fewer: short   claimed at the end of the tile before this one: a claim takes longer than a tile
//
// The table's counters are used, but for short tiles only with `balance`: a fixed order is faster. Claims keep tiles
// that start together consecutive although some are shorter, and blocks that started late take fewer. In each mode the
// entry of the next tile is fetched 3 K blocks before the end of this one (kFetchAhead).
// kBlockM: how groups are cut, see RowTiles. kBlocks: the blocks of a cluster, only one of which has a queue.
template <int kBlockM, int kTilesAtOnce = 1, int kBlocks = 1>
struct TileQueue {
    static constexpr int kClaimAhead = 6, kFetchAhead = 3;  // K blocks
    static constexpr int kBandBlocks = 1024;                // of 128 rows by 128 of K: 16 MB

    const int4* table;  // null: one group, rows 0 to m
    int* counters;      // claimed tiles and finished blocks, zero between launches; null: every gridDim.x-th tile
    int m, column_tiles, total, k_blocks, band;
    int index, claimed;  // this tile; the claim after it or, of short tiles, the one after that (in the elected lane)
    int part;            // lane i of four has number i of the table entry, and waits for it only when it needs the tile

    // `claim_pair`: which pair of counters in `num_tiles`, 0 or 1.
    DEVICE TileQueue(const int4* table, int* num_tiles, int claim_pair, int m, int column_tiles, int k_blocks,
                     bool balance = false)
        : table(table), m(m), column_tiles(column_tiles), k_blocks(k_blocks) {
        total = column_tiles * (table ? *num_tiles : RowTiles(m, kBlockM).count);
        counters = table && (balance || !short_tiles()) ? num_tiles + 1 + 2 * claim_pair : nullptr;
        band = max(kBandBlocks / k_blocks, 1);
        index = blockIdx.x / kBlocks * kTilesAtOnce, claimed = int(blockIdx.x / kBlocks) - owners();
        fetch();
    }
    DEVICE static int owners() { return gridDim.x / kBlocks; }  // of queues
    DEVICE bool short_tiles() const { return k_blocks <= kClaimAhead; }
    DEVICE bool ends_claim() const { return index % kTilesAtOnce == kTilesAtOnce - 1; }
    DEVICE void fetch() {
        int i = threadIdx.x % 4;
        if (index >= total) return;
        part = table ? reinterpret_cast<const int*>(table + index / column_tiles)[i] : i == 2 ? m : 0;
    }
    // Tiles that blocks have without claiming them: the first, and the second of short tiles.
    DEVICE int given() const { return short_tiles() ? 2 * owners() : owners(); }
    DEVICE void claim() {
        if (counters) claimed = atomic_add_by_one_lane(counters, claimed);
    }
    // Called in each K block of the current tile: prepares the next one without waiting.
    DEVICE void prepare_next(int k) {
        if (k == k_blocks - kClaimAhead && !short_tiles() && ends_claim()) claim();
        if (k != max(k_blocks - kFetchAhead, 0)) return;
        bool next_claim = ends_claim();
        if (!next_claim)
            ++index;
        else if (counters)
            index = (given() + __shfl_sync(~0u, claimed, leader_lane())) * kTilesAtOnce;
        else
            index += (owners() - 1) * kTilesAtOnce + 1;
        fetch();
        if (next_claim && short_tiles()) claim();
    }
    DEVICE Tile tile() const {  // called by all lanes
        if (index >= total) return {};
        int expert = __shfl_sync(~0u, part, 0), begin = __shfl_sync(~0u, part, 1);
        int end = __shfl_sync(~0u, part, 2), first = __shfl_sync(~0u, part, 3);
        RowTiles tiles(end - begin, kBlockM);
        int local = index - first * column_tiles, band_begin = 0, band_count = tiles.count;
        if (kBlockM >= kManyRowsTile && kTilesAtOnce == 1 && tiles.count > band) {
            band_begin = local / (band * column_tiles) * band;
            band_count = min(band, tiles.count - band_begin);
            local -= band_begin * column_tiles;
        }
        int row_tile = band_begin + local % band_count, last = index >= total - 2 * owners();
        int row = begin + tiles.begin(row_tile);
        return {expert, first + row_tile, row, tiles.size(row_tile), local / band_count, last};
    }
    // The last block to finish resets the counters for the next launch.
    DEVICE void finish() {
        if (!counters) return;
        __threadfence();  // after this warp's last claim, the result of which is not used
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        if (atomicAdd(counters + 1, 1) == owners() - 1) counters[0] = counters[1] = 0;
    }
};
