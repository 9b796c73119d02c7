// The main loop of the math warpgroups for row tiles of decoded weights: as in mma/row_tile.cuh rows of a fragment are
// tokens. A stage has one or two chunks of 128 rows of weights, see shared_tiles.cuh.
#pragma once
#include "device/wgmma.cuh"
#include "pipeline/shared_tiles.cuh"

// What a warpgroup multiplies of its block's tile: kBlocks blocks of 64 tokens by kChunks chunks, and with kHasHalf
// half of a chunk by the third block of three.
template <int kNumBlocks, int kNumChunks, bool kHasThird>
struct PartOfTile {
    static constexpr int kBlocks = kNumBlocks, kChunks = kNumChunks;
    static constexpr bool kHasHalf = kHasThird;
    using Sums = Fragment<kHalfN>[kBlocks][kChunks];
    using HalfSums = Fragment<kHalfN / 2>[1];  // unused without kHasHalf

    bool split;        // see OwnTiles
    int block, chunk;  // the first ones

    // The first token in the tile: block 1 of the part is the third of three, which the warpgroups share, or the
    // second of the warpgroup's two.
    DEVICE int token(int i) const { return (i == 0 ? block : kHasHalf ? 2 : block + 2) * kWarpgroupM; }
    DEVICE int rows(const Tile& tile, int i) const { return min(kWarpgroupM, tile.rows - token(i)); }
};

// Calls compute(part) with the warpgroup's part of a tile. Of a split tile of at most 64 tokens both warpgroups compute
// the same, and store the same bytes: there is one at most among an expert's columns.
template <class Compute>
DEVICE void compute_part(const Tile& tile, int columns, int warpgroup, Compute compute) {
    const bool split = OwnTiles::splits_weights(tile, columns), short_tile = tile.rows <= kWarpgroupM;
    const int rank = warp_uniform(rank_of_block());
    if (tile.rows > 3 * kWarpgroupM)
        compute(PartOfTile<2, 1, false>{true, warpgroup, rank});
    else if (tile.rows > kBlockM)
        compute(PartOfTile<1, 1, true>{true, warpgroup, rank});
    else if (split || short_tile)
        compute(PartOfTile<1, 1, false>{split, short_tile ? 0 : warpgroup, split ? rank : warpgroup});
    else
        compute(PartOfTile<1, 2, false>{false, warpgroup, 0});
}

// Multiplies 64 tokens at `tokens` by the rows of weights from `row` on, those of chunk `chunk`. kPaired: rows of the
// gate and of the up projection take turns. Calls release() when the stage has been read.
template <bool kPaired, int kElements, class SharedMemory, class Release>
DEVICE void add_product(const WeightTile<SharedMemory>& weights, u32 tokens, const float (&token_scale)[2], int chunk,
                        int row, float (&sum)[kElements], Release release) {
    constexpr int kScales = kPaired ? 2 : 1, kTurn = kPairedRows / 2;  // elements
    float product[kElements], scale[kScales][2];
    wgmma_start(product, tokens, weights.operand(row));
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
        const float of_weights = weights.scale_of_half(kPaired ? i : chunk);
        scale[i][0] = token_scale[0] * of_weights, scale[i][1] = token_scale[1] * of_weights;
    }
    wgmma_finish(product);
    release();
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] += scale[kPaired ? e / kTurn % 2 : 0][row_index(e)] * product[e];
}

template <bool kPaired, class Part, class SharedMemory, int kStages>
DEVICE void multiply_part(SharedMemory shared, Ring<kStages>& ring, int steps, const Tile& tile, const Part& part,
                          int warpgroup, typename Part::Sums& sum, typename Part::HalfSums& half) {
    const int first = ActivationScales::offset(tile.row) + warp_row(threadIdx.x) + lane_row(threadIdx.x);
#pragma unroll
    for (int i = 0; i < Part::kBlocks; ++i) clear(sum[i]);
    clear(half);
    bool ready = false;  // whether the next stage is known to be full
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int s = ring.stage;
        const WeightTile weights(shared, s);
        if (!ready) barrier_wait(shared.full(s), ring.phase);
        auto scales_of = [&](int i, float (&scale)[2]) {
            const int row = first + part.token(i);
            scale[0] = load_shared_float(shared.token_scale(s, row));
            scale[1] = load_shared_float(shared.token_scale(s, row + row_offset(1)));
        };
        auto release_stage = [&] {
            release(shared, s);
            ring.advance();
            ready = step + 1 < steps && barrier_completed(shared.full(ring.stage), ring.phase);
        };
        float scale[2];
#pragma unroll
        for (int i = 0; i < Part::kBlocks; ++i) {
            const u32 tokens =
                i == 0 ? shared.tokens(s, part.token(0)) : further_tokens(shared, s, part.chunk, part.token(1));
            scales_of(i, scale);
#pragma unroll
            for (int j = 0; j < Part::kChunks; ++j) {
                const bool last = !Part::kHasHalf && i == Part::kBlocks - 1 && j == Part::kChunks - 1;
                const int chunk = part.chunk + j;
                add_product<kPaired>(weights, tokens, scale, chunk, chunk * kHalfN, sum[i][j], [&] {
                    if (last) release_stage();
                });
            }
        }
        if constexpr (Part::kHasHalf) {
            scales_of(1, scale);
            add_product<kPaired>(weights, further_tokens(shared, s, part.chunk, part.token(1)), scale, part.chunk,
                                 part.chunk * kHalfN + warpgroup * kHalfN / 2, half[0], release_stage);
        }
    }
}
