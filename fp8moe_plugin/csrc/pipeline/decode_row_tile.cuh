// The producers of row tiles of packed weights (weights_mxfp4_decoded.cuh). In each block of a cluster one warp loads
// chunks to a ring of their own, and another one tokens and scales, as load_row_tile.cuh does. A warpgroup decodes the
// chunks to the stage of the tokens. The first warp of block 0 owns the queue, see shared_tiles.cuh.
#pragma once
#include "pipeline/shared_tiles.cuh"

constexpr int kChunksOfStep = 2;  // a column has 256 rows of weights

template <int kCount>
struct ChunkStages : Once<kCount, kChunkBytes, 128> {};
template <int kCount>
struct ChunksFull : Once<kCount, 8, 8> {};  // the announced bytes
template <int kCount>
struct ChunksEmpty : Once<kCount, 8, 8> {};  // an arrival of each decoding warp

// Shared memory of a kernel with kChunkStages stages of chunks.
template <int kChunkStages, int kStagingRows, class... Others>
using DecodedRowTileStages =
    RowTileStages<2, kStagingRows, ChunkStages<kChunkStages>, ChunksFull<kChunkStages>, ChunksEmpty<kChunkStages>,
                  TilesAhead<kTilesAhead>, TileThere<kTilesAhead>, TileRead<kTilesAhead>, WeightTables<1>, Others...>;
template <class SharedMemory>
constexpr int kChunkStagesOf = SharedMemory::template kBytes<ChunksFull> / 8;

// In place of init_barriers.
template <class SharedMemory>
DEVICE void init_decoding(SharedMemory shared, int full_arrivals, int math_warps) {
    init_weights(shared.template at<WeightTables>(0));
    if (threadIdx.x == 0) {
        for (int i = 0; i < kChunkStagesOf<SharedMemory>; ++i) {
            barrier_init(shared.template at<ChunksFull>(i), 1);
            barrier_init(shared.template at<ChunksEmpty>(i), kDecoderWarps);
        }
        init_passing(shared);
    }
    init_barriers(shared, SharedMemory::kStages, full_arrivals, math_warps);
    cluster_arrive();
    cluster_wait();
}

// ---- the first warp of the producers --------------------------------------------------------------------------------

// Loads the chunks of a block's tiles. loads_of(tile) has start(to, full, step, i), which starts to load chunk i of a
// step's two.
template <class SharedMemory, class LoadsOf>
struct ChunkLoads {
    SharedMemory shared;
    int steps, columns;
    LoadsOf loads_of;
    Ring<kChunkStagesOf<SharedMemory>> ring;

    // prepare(step) is called for each step of a tile.
    template <class Prepare>
    DEVICE void load(const Tile& both, Prepare prepare) {
        OwnTiles own(both, columns);
        const int first = own.split ? rank_of_block() : 0, end = own.split ? first + 1 : kChunksOfStep;
        for (; own.count > 0; --own.count, ++own.tile.column) {
            const auto loads = loads_of(own.tile);
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
#pragma unroll 1
                for (int chunk = first; chunk < end; ++chunk) load_chunk(loads, step, chunk);
                if (own.count == 1) prepare(step);
            }
        }
    }

   private:
    template <class Loads>
    DEVICE void load_chunk(const Loads& loads, int step, int chunk) {
        const u32 full = shared.template at<ChunksFull>(ring.stage);
        wait_by_warp(shared.template at<ChunksEmpty>(ring.stage), ring.phase ^ 1);
        if (lane_of_warp() == 0) {
            barrier_arrive_expect(full, kChunkBytes);
            loads.start(shared.template at<ChunkStages>(ring.stage), full, step, chunk);
        }
        ring.advance();
    }
};

// before_end(): called by both blocks after the last tile.
template <class SharedMemory, class MakeQueue, class LoadsOf, class BeforeEnd>
DEVICE void load_chunks(SharedMemory shared, int steps, int columns, MakeQueue make_queue, LoadsOf loads_of,
                        BeforeEnd before_end) {
    ChunkLoads<SharedMemory, LoadsOf> loads{shared, steps, columns, loads_of, {}};
    PassedTiles tiles;
    if (rank_of_block() == 0) {
        auto queue = make_queue();
        while (queue.index < queue.total) {
            const Tile tile = queue.tile();
            tiles.pass(shared, tile);
            loads.load(tile, [&](int step) { queue.prepare_next(step); });
        }
        tiles.pass(shared, Tile{});
        tiles.finish(shared);
        before_end();
        queue.finish();
    } else {
        for (Tile tile = tiles.receive(shared); tile.rows > 0; tile = tiles.receive(shared))
            loads.load(tile, [](int) {});
        before_end();
    }
}

// ---- the second one -------------------------------------------------------------------------------------------------

// Loads a tile's tokens and scales. `weights` has k_block(step) and load_scales(tile, step), which starts to copy the
// scales of a step to a WeightTile.
template <class SharedMemory, int kStages, class Scales>
DEVICE void load_tokens_of_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, const Tile& tile,
                                const Scales& weights) {
    const int rows = ceil_div(tile.rows, kWarpgroupM) * kWarpgroupM;
    const u32 scale_bytes = ActivationScales::bytes(tile), bytes = rows * kBlockK + scale_bytes;
    const float* scales = in.token_scales.of_tile(tile);
    fill_stages<wait_by_warp>(shared, ring, 0, in.steps, [&](int step, int s, u32 full) {
        if (lane_of_warp() != 0) return;
        const int k = weights.k_block(step);
        if (step == 0) publish_tile(shared.tile(s), tile);
        weights.load_scales(WeightTile(shared, s), step);
        barrier_arrive_expect(full, bytes);
#pragma unroll 1
        for (int row = 0; row < rows; row += kWarpgroupM)
            tma_load(row < kBlockM ? shared.tokens(s, row) : further_tokens(shared, s, rank_of_block(), row), in.tokens,
                     full, k * kBlockK, tile.row + row);
        bulk_load(shared.token_scale(s, 0), scales + u32(k) * in.token_scales.k_stride, full, scale_bytes);
        copy_async_arrive(full);
    });
}

// prepare(both) is called before each tile of both blocks; scales_of(tile) returns `weights` of load_tokens_of_tile.
template <class SharedMemory, int kStages, class Prepare, class ScalesOf>
DEVICE void load_tokens(SharedMemory shared, Ring<kStages>& ring, const Operands& in, int columns, Prepare prepare,
                        ScalesOf scales_of) {
    PassedTiles tiles;
    for (Tile both = tiles.receive<true>(shared); both.rows > 0; both = tiles.receive<true>(shared)) {
        prepare(both);
        for (OwnTiles own(both, columns); own.count > 0; --own.count, ++own.tile.column)
            load_tokens_of_tile(shared, ring, in, own.tile, scales_of(own.tile));
    }
    end_tiles<1>(shared, ring);
}

// ---- decoders: a warpgroup ------------------------------------------------------------------------------------------

template <bool kPaired, class SharedMemory>
struct Decoders {
    SharedMemory shared;
    Ring<SharedMemory::kStages> ring;
    Ring<kChunkStagesOf<SharedMemory>> chunks;

    // Decodes kCount chunks of each step, from chunk `first` on.
    template <int kCount>
    DEVICE void decode_tile(int steps, int first) {
        const int lane = lane_of_warp();
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.advance()) {
            ChunkDecoder<kPaired> decoder[kCount];
            u32 empty[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i, chunks.advance()) {
                barrier_wait(shared.template at<ChunksFull>(chunks.stage), chunks.phase);
                decoder[i].read(shared.template at<ChunkStages>(chunks.stage));
                empty[i] = shared.template at<ChunksEmpty>(chunks.stage);
            }
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            const u32 rows = shared.weights(ring.stage, 0);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                decoder[i].write(rows, first + i, shared.template at<WeightTables>(0));
                __syncwarp();
                if (lane == 0) barrier_arrive(empty[i]);
            }
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.full(ring.stage));
        }
    }
};

template <bool kPaired, class SharedMemory>
DEVICE void decode_tiles(SharedMemory shared, int steps, int columns) {
    Decoders<kPaired, SharedMemory> decoders{shared, {}, {}};
    PassedTiles tiles;
    for (Tile both = tiles.receive(shared); both.rows > 0; both = tiles.receive(shared)) {
        const OwnTiles own(both, columns);
        if (own.split)
            for (int i = 0; i < own.count; ++i) decoders.template decode_tile<1>(steps, rank_of_block());
        else
            decoders.template decode_tile<kChunksOfStep>(steps, 0);
    }
    auto& ring = decoders.ring;
    wait_by_warp(shared.empty(ring.stage), ring.phase ^ 1);
    if (lane_of_warp() == 0) barrier_arrive(shared.full(ring.stage));  // of the stage without a tile
}
