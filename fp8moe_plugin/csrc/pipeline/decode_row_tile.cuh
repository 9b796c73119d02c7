// The producers of row tiles of packed weights (weights_mxfp4_decoded.cuh). One warp owns the queue of tiles and loads
// their chunks to a ring of their own. Another one loads tokens and scales, as load_row_tile.cuh does. A warpgroup
// decodes the chunks to the stage of the tokens. The first warp is ahead of the others, and passes each tile to them
// through shared memory.
#pragma once
#include "pipeline/producer.cuh"
#include "pipeline/row_tile.cuh"
#include "pipeline/tile_queue.cuh"

constexpr int kDecoderWarps = 4, kTilesAhead = 2;
constexpr int kTileReaders = 1 + kDecoderWarps;  // warps
constexpr int kChunksOfStep = 2;                 // a tile has 256 rows of weights

template <int kCount>
struct ChunkStages : Once<kCount, kChunkBytes, 128> {};
template <int kCount>
struct ChunksFull : Once<kCount, 8, 8> {};  // the announced bytes
template <int kCount>
struct ChunksEmpty : Once<kCount, 8, 8> {};  // an arrival of each decoding warp
template <int kCount>
struct TilesAhead : Once<kCount, 16, 16> {};
template <int kCount>
struct TileThere : Once<kCount, 8, 8> {};
template <int kCount>
struct TileRead : Once<kCount, 8, 8> {};

// Shared memory of a kernel with kChunkStages stages of chunks.
template <int kChunkStages, int kStagingRows, class... Others>
using DecodedRowTileStages =
    RowTileStages<2, kStagingRows, ChunkStages<kChunkStages>, ChunksFull<kChunkStages>, ChunksEmpty<kChunkStages>,
                  TilesAhead<kTilesAhead>, TileThere<kTilesAhead>, TileRead<kTilesAhead>, WeightTables<1>, Others...>;
template <class SharedMemory>
constexpr int kChunkStagesOf = SharedMemory::template kBytes<ChunksFull> / 8;

// Before init_barriers.
template <class SharedMemory>
DEVICE void init_decoding(SharedMemory shared) {
    init_weights(shared.template at<WeightTables>(0));
    if (threadIdx.x > 0) return;
    for (int i = 0; i < kChunkStagesOf<SharedMemory>; ++i) {
        barrier_init(shared.template at<ChunksFull>(i), 1);
        barrier_init(shared.template at<ChunksEmpty>(i), kDecoderWarps);
    }
    for (int i = 0; i < kTilesAhead; ++i) {
        barrier_init(shared.template at<TileThere>(i), 1);
        barrier_init(shared.template at<TileRead>(i), kTileReaders);
    }
}

// The tiles on their way from the owner of the queue to the other warps.
struct PassedTiles {
    Ring<kTilesAhead> ring;

    template <class SharedMemory>
    DEVICE void pass(SharedMemory shared, const Tile& tile) {
        wait_by_warp(shared.template at<TileRead>(ring.stage), ring.phase ^ 1);
        if (lane_of_warp() == 0) {
            publish_tile(shared.template at<TilesAhead>(ring.stage), tile);
            barrier_arrive(shared.template at<TileThere>(ring.stage));
        }
        ring.advance();
    }
    template <class SharedMemory>
    DEVICE Tile receive(SharedMemory shared) {
        barrier_wait(shared.template at<TileThere>(ring.stage), ring.phase);
        const Tile tile = published_tile(shared.template at<TilesAhead>(ring.stage));
        __syncwarp();
        if (lane_of_warp() == 0) barrier_arrive(shared.template at<TileRead>(ring.stage));
        ring.advance();
        return tile;
    }
};

// ---- the first warp of the producers --------------------------------------------------------------------------------

// loads_of(tile) has start(to, full, step, i), which starts to load chunk i of a step.
template <class SharedMemory, class Queue, class LoadsOf>
DEVICE void load_chunks(SharedMemory shared, Queue& queue, int steps, LoadsOf loads_of) {
    Ring<kChunkStagesOf<SharedMemory>> ring;
    PassedTiles tiles;
    while (queue.index < queue.total) {
        const Tile tile = queue.tile();
        tiles.pass(shared, tile);
        const auto loads = loads_of(tile);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int i = 0; i < kChunksOfStep; ++i, ring.advance()) {
                const u32 full = shared.template at<ChunksFull>(ring.stage);
                wait_by_warp(shared.template at<ChunksEmpty>(ring.stage), ring.phase ^ 1);
                if (lane_of_warp() > 0) continue;
                barrier_arrive_expect(full, kChunkBytes);
                loads.start(shared.template at<ChunkStages>(ring.stage), full, step, i);
            }
            queue.prepare_next(step);
        }
    }
    tiles.pass(shared, Tile{});
}

// ---- the second one -------------------------------------------------------------------------------------------------

// A tile's tokens and scales. `weights` has k_block(step) and load_scales(tile, step), which starts to copy the scales
// of a step to a WeightTile.
template <class SharedMemory, int kStages, class Scales>
DEVICE void load_tokens(SharedMemory shared, Ring<kStages>& ring, const Operands& in, const Tile& tile, int steps,
                        const Scales& weights) {
    const int rows = ceil_div(tile.rows, kWarpgroupM) * kWarpgroupM;
    const u32 scale_bytes = ActivationScales::bytes(tile);
    const float* scales = in.token_scales.of_tile(tile);
    fill_stages<wait_by_warp>(shared, ring, 0, steps, [&](int step, int s, u32 full) {
        if (lane_of_warp() != 0) return;
        const int k = weights.k_block(step);
        if (step == 0) publish_tile(shared.tile(s), tile);
        weights.load_scales({shared, s}, step);
        barrier_arrive_expect(full, rows * kBlockK + scale_bytes);
#pragma unroll 1
        for (int row = 0; row < rows; row += kWarpgroupM)
            tma_load(shared.tokens(s, row), in.tokens, full, k * kBlockK, tile.row + row);
        bulk_load(shared.token_scale(s, 0), scales + i64(k) * in.token_scales.k_stride, full, scale_bytes);
        copy_async_arrive(full);
    });
}

// ---- decoders: a warpgroup ------------------------------------------------------------------------------------------

template <bool kPaired, class SharedMemory>
DEVICE void decode_tiles(SharedMemory shared, int steps) {
    Ring<SharedMemory::kStages> ring;
    Ring<kChunkStagesOf<SharedMemory>> chunks;
    PassedTiles tiles;
    while (tiles.receive(shared).rows > 0) {
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.advance()) {
            u32 chunk[kChunksOfStep], empty[kChunksOfStep];
#pragma unroll
            for (int i = 0; i < kChunksOfStep; ++i, chunks.advance()) {
                barrier_wait(shared.template at<ChunksFull>(chunks.stage), chunks.phase);
                chunk[i] = shared.template at<ChunkStages>(chunks.stage);
                empty[i] = shared.template at<ChunksEmpty>(chunks.stage);
            }
            const ChunkDecoder<kPaired> decoder(chunk, shared.template at<WeightTables>(0));
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            decoder.write(shared.weights(ring.stage, 0), [&](int i) {
                __syncwarp();
                if (lane_of_warp() == 0) barrier_arrive(empty[i]);
            });
            fence_proxy_async();
            __syncwarp();
            if (lane_of_warp() == 0) barrier_arrive(shared.full(ring.stage));
        }
    }
    wait_by_warp(shared.empty(ring.stage), ring.phase ^ 1);
    if (lane_of_warp() == 0) barrier_arrive(shared.full(ring.stage));  // of the stage without a tile
}
