// The producers of row tiles of packed weights (weights_mxfp4_decoded.cuh). In each block of a cluster one warp loads
// chunks to a ring of their own, and another one tokens and scales, as load_row_tile.cuh does. A warpgroup decodes the
// chunks to the stage of the tokens. The first warp of block 0 owns the queue, see shared_tiles.cuh.
//
// Of weights that the blocks share, each decodes half, and copies it to the same stage of the other one.
#pragma once
#include "pipeline/shared_tiles.cuh"

constexpr int kChunksOfStep = 2;                     // a tile has 256 rows of weights
constexpr u32 kDecodedBytes = kChunkRows * kBlockK;  // of a chunk

template <int kCount>
struct ChunkStages : Once<kCount, kChunkBytes, 128> {};
template <int kCount>
struct ChunksFull : Once<kCount, 8, 8> {};  // the announced bytes
template <int kCount>
struct ChunksEmpty : Once<kCount, 8, 8> {};  // an arrival of each decoding warp
template <int kCount>
struct OtherReady : PerStage<kCount, 8, 8> {};  // the other block awaits a copy in the stage
template <int kCount>
struct CopyTaken : PerStage<kCount, 8, 8> {};  // the other block has used the last copy, and awaits none

// Shared memory of a kernel with kChunkStages stages of chunks.
template <int kChunkStages, int kStagingRows, class... Others>
using DecodedRowTileStages = RowTileStages<2, kStagingRows, OtherReady<1>, CopyTaken<1>, ChunkStages<kChunkStages>,
                                           ChunksFull<kChunkStages>, ChunksEmpty<kChunkStages>, TilesAhead<kTilesAhead>,
                                           TileThere<kTilesAhead>, TileRead<kTilesAhead>, WeightTables<1>, Others...>;
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
        for (int s = 0; s < SharedMemory::kStages; ++s) {
            barrier_init(shared.template at<OtherReady>(s, 0), 1);
            barrier_init(shared.template at<CopyTaken>(s, 0), 1);
        }
    }
    init_barriers(shared, SharedMemory::kStages, full_arrivals, math_warps);
    cluster_arrive();
    cluster_wait();
}

// By all threads at the end: a block must not end before the other one has copied all that it copies.
DEVICE void end_decoding() {
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
        const int first = own.shares ? rank_of_block() : 0, end = own.shares ? first + 1 : kChunksOfStep;
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

struct StageBits {
    u32 bits = 0;
    DEVICE bool of(int i) const { return bits >> i & 1; }
    DEVICE void flip(int i) { bits ^= 1u << i; }
    DEVICE void set(int i, bool value) {
        if (of(i) != value) flip(i);
    }
};

template <class SharedMemory, int kStages>
struct TokenLoads {
    SharedMemory shared;
    const Operands& in;
    Ring<kStages>& ring;
    StageBits copied;  // whether a stage was copied from the other block

    // Loads a tile's tokens and scales. `weights` has k_block(step) and load_scales(tile, step), which starts to copy
    // the scales of a step to a WeightTile. `shares`: the other block copies half of the weights.
    template <class Scales>
    DEVICE void load(const Tile& tile, const Scales& weights, bool shares) {
        const int rows = ceil_div(tile.rows, kWarpgroupM) * kWarpgroupM;
        const u32 scale_bytes = ActivationScales::bytes(tile);
        const u32 bytes = rows * kBlockK + scale_bytes + (shares ? kDecodedBytes : 0);
        const float* scales = in.token_scales.of_tile(tile);
        fill_stages<wait_by_warp>(shared, ring, 0, in.steps, [&](int step, int s, u32 full) {
            if (lane_of_warp() != 0) return;
            const int k = weights.k_block(step);
            if (step == 0) publish_tile(shared.tile(s), tile);
            weights.load_scales({shared, s}, step);
            barrier_arrive_expect(full, bytes);
            if (shares)
                tell_other(shared.template at<OtherReady>(s, 0));
            else if (copied.of(s))
                tell_other(shared.template at<CopyTaken>(s, 0));
            copied.set(s, shares);
#pragma unroll 1
            for (int row = 0; row < rows; row += kWarpgroupM)
                tma_load(shared.tokens(s, row), in.tokens, full, k * kBlockK, tile.row + row);
            bulk_load(shared.token_scale(s, 0), scales + u32(k) * in.token_scales.k_stride, full, scale_bytes);
            copy_async_arrive(full);
        });
    }

   private:
    DEVICE static void tell_other(u32 barrier) { barrier_arrive_in_cluster(in_block(barrier, rank_of_block() ^ 1)); }
};

// prepare(both) is called before each tile of both blocks; scales_of(tile) returns `weights` of TokenLoads.
template <class SharedMemory, int kStages, class Prepare, class ScalesOf>
DEVICE void load_tokens(SharedMemory shared, Ring<kStages>& ring, const Operands& in, int columns, Prepare prepare,
                        ScalesOf scales_of) {
    TokenLoads<SharedMemory, kStages> loads{shared, in, ring, {}};
    PassedTiles tiles;
    for (Tile both = tiles.receive<true>(shared); both.rows > 0; both = tiles.receive<true>(shared)) {
        prepare(both);
        for (OwnTiles own(both, columns); own.count > 0; --own.count, ++own.tile.column)
            loads.load(own.tile, scales_of(own.tile), own.shares);
    }
    end_tiles<1>(shared, ring);
}

// ---- decoders: a warpgroup ------------------------------------------------------------------------------------------

template <bool kPaired, class SharedMemory>
struct Decoders {
    using Decoder = ChunkDecoder<kPaired>;

    SharedMemory shared;
    Ring<SharedMemory::kStages> ring;
    Ring<kChunkStagesOf<SharedMemory>> chunks;
    StageBits copied, ready, taken;  // whether a stage was copied to the other block; the phases to wait for

    // Decodes chunk `first` of each step, or with kCount 2 both; kShares: and copies it to the other block.
    template <int kCount, bool kShares>
    DEVICE void decode_tile(int steps, int first) {
        const int lane = lane_of_warp();
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.advance()) {
            Decoder decoder[kCount];
            u32 empty[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i, chunks.advance()) {
                barrier_wait(shared.template at<ChunksFull>(chunks.stage), chunks.phase);
                decoder[i].read(shared.template at<ChunkStages>(chunks.stage));
                empty[i] = shared.template at<ChunksEmpty>(chunks.stage);
            }
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            wait_for_other<kShares>();
            const u32 rows = shared.weights(ring.stage, 0), full = shared.full(ring.stage);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                decoder[i].write(rows, first + i, shared.template at<WeightTables>(0));
                __syncwarp();
                if (lane == 0) barrier_arrive(empty[i]);
            }
            fence_proxy_async();
            __syncwarp();
            if (kShares && lane < Decoder::kCopies) {
                const u32 from = rows + Decoder::first_row(first, lane) * kRowOfTile;
                bulk_copy_to_block(in_block(from, first ^ 1), from, kDecodedBytes / kDecoderWarps / Decoder::kCopies,
                                   in_block(full, first ^ 1));
            }
            if (lane == 0) barrier_arrive(full);
        }
    }

   private:
    // Until the other block awaits a copy in the stage. It has then used the last one, which may be overwritten here.
    template <bool kShares>
    DEVICE void wait_for_other() {
        const int s = ring.stage;
        if (kShares) {
            barrier_wait(shared.template at<OtherReady>(s, 0), ready.of(s));
            ready.flip(s);
        } else if (copied.of(s)) {
            barrier_wait(shared.template at<CopyTaken>(s, 0), taken.of(s));
            taken.flip(s);
        }
        copied.set(s, kShares);
    }
};

template <bool kPaired, class SharedMemory>
DEVICE void decode_tiles(SharedMemory shared, int steps, int columns) {
    Decoders<kPaired, SharedMemory> decoders{shared, {}, {}, {}, {}, {}};
    PassedTiles tiles;
    for (Tile both = tiles.receive(shared); both.rows > 0; both = tiles.receive(shared)) {
        const OwnTiles own(both, columns);
        if (own.shares)
            for (int i = 0; i < own.count; ++i) decoders.template decode_tile<1, true>(steps, rank_of_block());
        else
            decoders.template decode_tile<2, false>(steps, 0);
    }
    auto& ring = decoders.ring;
    wait_by_warp(shared.empty(ring.stage), ring.phase ^ 1);
    if (lane_of_warp() == 0) barrier_arrive(shared.full(ring.stage));  // of the stage without a tile
}
