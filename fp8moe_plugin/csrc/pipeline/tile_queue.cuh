// Which output tiles a thread block computes, and in which order; the table of row tiles is in tile_table.cuh.
#pragma once
#include "pipeline/producer.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_table.cuh"

struct Tile {
    int expert;
    int row_tile;  // index in the table
    int row;       // first row in A and D
    int rows;      // valid rows; 0: there are no more tiles
    int column;    // index along N, in tiles
    int last;      // 1: one of the last tiles, about two per block
};

// The tiles of a thread block, for its producer warp. The row tiles of an expert are consecutive, one column after the
// other: blocks that start consecutive tiles at about the same time read a tile of weights from device memory once, and
// then from L2. Where an expert has more row tiles than stay in L2, bands of them take turns with the columns.
//
// A block takes every gridDim.x-th tile; or, with counters, claims the next tile of all when it is done, so that
// consecutive tiles start together although some are shorter, and blocks that started late take fewer. Short tiles do
// not hide the latency of a claim and are claimed a tile earlier; without `balance` they are taken in fixed order,
// which is faster. Blocks take kTilesAtOnce consecutive tiles at a time.
template <int kBlockM, int kTilesAtOnce = 1>
struct TileQueue {
    static constexpr int kClaimAhead = 6, kFetchAhead = 3;  // K blocks before a tile's end
    static constexpr int kBandBlocks = 1024;                // of 128 rows by 128 of K: 16 MB

    const int4* table;  // null: one group, rows 0 to m
    int* counters;      // claimed tiles and finished blocks, zero between launches; null: every gridDim.x-th tile
    int m, column_tiles, total, k_blocks, band;
    int index, claimed;  // this tile; the claim after it or, of short tiles, the one after that (in the elected lane)
    int part;            // lane i of four has number i of the table entry, and waits for it only when it needs the tile

    // `claim_pair`: which pair of counters in `num_tiles`, 0 or 1. `balance`: short tiles are claimed, too.
    DEVICE TileQueue(const int4* table, int* num_tiles, int claim_pair, int m, int column_tiles, int k_blocks,
                     bool balance = false)
        : table(table), m(m), column_tiles(column_tiles), k_blocks(k_blocks) {
        total = column_tiles * (table ? *num_tiles : RowTiles(m, kBlockM).count);
        counters = table && (balance || !short_tiles()) ? num_tiles + 1 + 2 * claim_pair : nullptr;
        band = max(kBandBlocks / k_blocks, 1);
        index = blockIdx.x * kTilesAtOnce, claimed = blockIdx.x - gridDim.x;
        fetch();
    }
    DEVICE bool short_tiles() const { return k_blocks <= kClaimAhead; }
    DEVICE bool ends_claim() const { return index % kTilesAtOnce == kTilesAtOnce - 1; }
    DEVICE void fetch() {
        int i = threadIdx.x % 4;
        if (index >= total) return;
        part = table ? reinterpret_cast<const int*>(table + index / column_tiles)[i] : i == 2 ? m : 0;
    }
    // How many claims blocks start with, before the counter.
    DEVICE int given() const { return short_tiles() ? 2 * gridDim.x : gridDim.x; }
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
            index += (gridDim.x - 1) * kTilesAtOnce + 1;
        fetch();
        if (next_claim && short_tiles()) claim();
    }
    DEVICE Tile tile() const {  // called by all lanes
        if (index >= total) return {};
        int expert = __shfl_sync(~0u, part, 0), begin = __shfl_sync(~0u, part, 1);
        int end = __shfl_sync(~0u, part, 2), first = __shfl_sync(~0u, part, 3);
        RowTiles tiles(end - begin, kBlockM);
        int local = index - first * column_tiles, band_begin = 0, band_count = tiles.count;
        if (kBlockM == kManyRowsTile && kTilesAtOnce == 1 && tiles.count > band) {
            band_begin = local / (band * column_tiles) * band;
            band_count = min(band, tiles.count - band_begin);
            local -= band_begin * column_tiles;
        }
        int row_tile = band_begin + local % band_count, last = index >= total - 2 * int(gridDim.x);
        int row = begin + tiles.begin(row_tile);
        return {expert, first + row_tile, row, tiles.size(row_tile), local / band_count, last};
    }
    // The last block to finish resets the counters for the next launch.
    DEVICE void finish() {
        if (!counters) return;
        __threadfence();  // after this warp's last claim, whose result nobody reads
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
    }
};

// The tokens of a swap-AB tile with padding: the N of its wgmma.
DEVICE int padded_tokens(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// The producer passes a tile to the math warpgroups with the tile's first stage.
DEVICE void publish_tile(u32 address, const Tile& tile) {
    static_assert(RowTiles::kLongest < 1 << 8, "8 bits for rows, 1 for last, 23 for the column");
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(tile.expert), "r"(tile.row_tile),
                 "r"(tile.row), "r"(tile.rows | tile.last << 8 | tile.column << 9)
                 : "memory");
}
DEVICE Tile published_tile(u32 address) {
    Tile tile;
    u32 rest;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.expert), "=r"(tile.row_tile), "=r"(tile.row), "=r"(rest)
                 : "r"(address)
                 : "memory");
    tile.rows = rest & 0xff, tile.last = rest >> 8 & 1, tile.column = rest >> 9;
    return tile;
}

// Among four producer warps: the first one, which has the queue, passes its tile to the others through 16 bytes of
// shared memory.
template <class Queue>
DEVICE Tile share_tile(u32 address, int barrier, const Queue& queue, bool first_warp) {
    constexpr int kProducers = 128;
    named_barrier(barrier, kProducers);  // all have read the previous tile
    if (first_warp) {
        const Tile tile = queue.tile();
        if (threadIdx.x % 32 == 0) publish_tile(address, tile);
    }
    named_barrier(barrier, kProducers);
    return published_tile(address);
}

// ---- the producer's loop -------------------------------------------------------------------------------------------

// The producer's last stage holds no tile, which ends the loops of the math warpgroups. It waits for its copies: PTX
// does not guarantee arrivals of threads that have exited.
template <class SharedMemory, int kStages>
DEVICE void load_end(SharedMemory shared, Ring<kStages>& ring, int full_arrivals) {
    wait_by_warp(shared.empty(ring.stage), ring.phase ^ 1);
    if (threadIdx.x % 32 != 0) return;
    publish_tile(shared.tile(ring.stage), Tile{});
    for (int i = 0; i < full_arrivals; ++i) barrier_arrive(shared.full(ring.stage));
    copy_async_wait();
}

// The scales of activations, rows contiguous: (expert, row, k block) is at expert * expert_stride + row + k * k_stride.
// `data` and the strides are multiples of 16 bytes, but rows start anywhere. A tile's scales are therefore copied from
// the multiple of four rows at or before its first row to the one at or after its end, into kBlockM + kSlack floats.
struct ActivationScales {
    static constexpr int kSlack = 4;
    const float* data;
    int expert_stride, k_stride;

    DEVICE static int offset(int row) { return row % 4; }  // of the tile's first row in the copy
    DEVICE static u32 bytes(const Tile& tile) { return (offset(tile.row) + tile.rows + 3) / 4 * 16; }
    DEVICE const float* of_tile(const Tile& tile) const {
        return data + i64(tile.expert) * expert_stride + tile.row - offset(tile.row);
    }
};

// Fills a stage for each K block of the queue's tile, by one warp: its first lane announces `bytes` and calls
// load(stage, full, k, a_scale), which starts the copies; `full` is the stage's barrier, `a_scale` the scales of A.
template <class SharedMemory, int kStages, class Queue, class Load>
DEVICE void fill_stages(SharedMemory shared, Ring<kStages>& ring, Queue& queue, const Tile& tile,
                        const ActivationScales& a_scales, int k_blocks, u32 bytes, Load load) {
    const float* a_scale = a_scales.of_tile(tile);
#pragma unroll 1
    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        u32 full = shared.full(s);
        wait_by_warp(shared.empty(s), ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(full, bytes);
            load(s, full, k, a_scale);
            copy_async_arrive(full);
        }
        a_scale += a_scales.k_stride;
        queue.prepare_next(k);
    }
}
