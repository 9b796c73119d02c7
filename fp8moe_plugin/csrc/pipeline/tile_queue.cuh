// Which output tiles a block computes, and in which order. The table of row tiles: pipeline/tile_table.cuh.
#pragma once
#include "pipeline/ring.cuh"
#include "pipeline/tile_table.cuh"

struct Tile {
    int expert;
    int row_tile;  // index in the table
    int row;       // first row in A and D
    int rows;      // how many of its rows count; 0: there are no more tiles
    int column;    // index along N, in tiles
    int last;      // 1: it is among the last few that blocks take
};

// The tiles of a block, for its producer warp. Row tiles of an expert are neighbours, then its columns follow: blocks
// that start neighbours at about the same time read a tile of weights from device memory once, and from L2 after that.
// Where rows are so many that they would not stay in L2, groups of row tiles take turns with the columns.
//
// A block takes every gridDim.x-th tile; or, with counters, the next tile of all when it is done, so that neighbours
// start together although some tiles are shorter, and blocks that started late have fewer. Short tiles do not hide the
// counter's latency and are claimed a tile earlier; they are faster in fixed order where nothing speaks against it.
// Instead of a tile it takes a run of kRun, each time.
template <int kBlockM, int kRun = 1>
struct TileQueue {
    static constexpr int kClaimAhead = 6, kFetchAhead = 3;  // 128 K of work before a tile's end
    static constexpr int kGroupBlocks = 1024;               // of 128 rows by 128 K: 16 MB

    const int4* table;  // null: one group, rows 0 to m
    int* counters;      // tiles claimed and blocks done, zero between launches; null: every gridDim.x-th tile
    int m, column_tiles, total, k_blocks, group;
    int index, claimed;  // this tile; the next run or, of short tiles, the one after it (of the first lane)
    int part;  // lane i of four has the table entry's i-th number: waited for where the tile is needed, not before

    // `balance`: short tiles come from the counter too.
    DEVICE TileQueue(const int4* table, int* num_tiles, int claim_pair, int m, int column_tiles, int k_blocks,
                     bool balance = false)
        : table(table), m(m), column_tiles(column_tiles), k_blocks(k_blocks) {
        total = column_tiles * (table ? *num_tiles : RowTiles(m, kBlockM).count);
        counters = table && (balance || !short_tiles()) ? num_tiles + 1 + 2 * claim_pair : nullptr;
        group = max(kGroupBlocks / k_blocks, 1);
        index = blockIdx.x * kRun, claimed = blockIdx.x - gridDim.x;
        fetch();
    }
    DEVICE bool short_tiles() const { return k_blocks <= kClaimAhead; }
    DEVICE bool run_ends() const { return index % kRun == kRun - 1; }
    DEVICE void fetch() {
        int i = threadIdx.x % 4;
        if (index >= total) return;
        part = table ? reinterpret_cast<const int*>(table + index / column_tiles)[i] : i == 2 ? m : 0;
    }
    DEVICE int given() const { return short_tiles() ? 2 * gridDim.x : gridDim.x; }  // without the counter
    DEVICE void claim() {
        if (counters) claimed = atomic_add_by_one_lane(counters, claimed);
    }
    // To be called in each step of 128 K of the current tile: prepares the next one, waiting for nothing.
    DEVICE void step(int k) {
        if (k == k_blocks - kClaimAhead && !short_tiles() && run_ends()) claim();
        if (k != max(k_blocks - kFetchAhead, 0)) return;
        bool next_run = run_ends();
        if (!next_run)
            ++index;
        else if (counters)
            index = (given() + __shfl_sync(~0u, claimed, leader_lane())) * kRun;
        else
            index += (gridDim.x - 1) * kRun + 1;
        fetch();
        if (next_run && short_tiles()) claim();
    }
    DEVICE Tile tile() const {  // by all lanes
        if (index >= total) return {};
        int expert = __shfl_sync(~0u, part, 0), begin = __shfl_sync(~0u, part, 1);
        int end = __shfl_sync(~0u, part, 2), first = __shfl_sync(~0u, part, 3);
        RowTiles tiles(end - begin, kBlockM);
        int local = index - first * column_tiles, group_begin = 0, group_count = tiles.count;
        if (kBlockM == kManyRowsTile && kRun == 1 && tiles.count > group) {
            group_begin = local / (group * column_tiles) * group;
            group_count = min(group, tiles.count - group_begin);
            local -= group_begin * column_tiles;
        }
        int row_tile = group_begin + local % group_count, last = index >= total - 2 * int(gridDim.x);
        int row = begin + tiles.begin(row_tile);
        return {expert, first + row_tile, row, tiles.size(row_tile), local / group_count, last};
    }
    // The last block to finish resets the counters for the next launch.
    DEVICE void finish() {
        if (!counters) return;
        __threadfence();  // after this warp's last claim, whose result is never read
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
    }
};

// The N of wgmma for a swap-AB tile of `rows` tokens.
DEVICE int padded_tokens(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// The producer passes the tile to the math warpgroups with the first stage of it.
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

// Among the four warps of a producer: the first one, which has the queue, hands its tile to the others through 16 bytes
// of shared memory.
template <class Queue>
DEVICE Tile share_tile(u32 address, int barrier, const Queue& queue, bool first_warp) {
    constexpr int kProducers = 128;
    named_barrier(barrier, kProducers);  // all have read the tile before
    if (first_warp) {
        const Tile tile = queue.tile();
        if (threadIdx.x % 32 == 0) publish_tile(address, tile);
    }
    named_barrier(barrier, kProducers);
    return published_tile(address);
}

// ---- the producer's loop -------------------------------------------------------------------------------------------

// The producer's last stage: it holds no tile. PTX promises no arrivals of threads that have exited.
template <class SharedMemory, int kStages>
DEVICE void load_end(SharedMemory shared, Ring<kStages>& ring, int full_arrivals) {
    barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
    if (threadIdx.x % 32 != 0) return;
    publish_tile(shared.tile(ring.stage), Tile{});
    for (int i = 0; i < full_arrivals; ++i) barrier_arrive(shared.full(ring.stage));
    copy_async_wait();
}

// The scales of activations, rows contiguous: (expert, row, k block) is at expert * expert_stride + row + k * k_stride.
// `data` and the strides are multiples of 16 bytes and rows start anywhere, so that a tile's scales are copied from the
// multiple at or before its first row on, up to the multiple after its last: into room for kBlockM + kSlack floats.
struct ActivationScales {
    static constexpr int kSlack = 4;
    const float* data;
    int expert_stride, k_stride;

    DEVICE static int offset(int row) { return row % 4; }  // of the first row in the copy
    DEVICE static u32 bytes(const Tile& tile) { return (offset(tile.row) + tile.rows + 3) / 4 * 16; }
    DEVICE const float* of_tile(const Tile& tile) const {
        return data + i64(tile.expert) * expert_stride + tile.row - offset(tile.row);
    }
};

// Fills a stage for each 128 K of the queue's tile, by one warp: its first lane announces `bytes` and calls
// `load(stage, full, k, a_scale)`, which starts the copies; `full` is the stage's barrier, `a_scale` the scales of A.
template <class SharedMemory, int kStages, class Queue, class Load>
DEVICE void fill_stages(SharedMemory shared, Ring<kStages>& ring, Queue& queue, const Tile& tile,
                        const ActivationScales& a_scales, int k_blocks, u32 bytes, Load load) {
    const float* a_scale = a_scales.of_tile(tile);
#pragma unroll 1
    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        u32 full = shared.full(s);
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(full, bytes);
            load(s, full, k, a_scale);
            copy_async_arrive(full);
        }
        a_scale += a_scales.k_stride;
        queue.step(k);
    }
}
