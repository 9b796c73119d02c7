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

// The low words of the descriptors of a warpgroup's operands, in any stage.
template <class SharedMemory>
struct DescribedOperands {
    u32 first_tokens, further, weights, half;  // in stage 0

    template <class Part>
    DEVICE DescribedOperands(SharedMemory shared, const Part& part, int warpgroup)
        : first_tokens(described(shared.tokens(0, part.token(0)))),
          further(described(further_tokens(shared, 0, part.chunk, part.token(1)))),
          weights(described(shared.weights(0, part.chunk * kHalfN))),
          half(described(shared.weights(0, part.chunk * kHalfN + warpgroup * kHalfN / 2))) {}

    // Block i of the part's tokens.
    DEVICE u32 tokens(int stage, int i) const {
        return i == 0 ? first_tokens + stage * kDistance<Tokens> : further + stage * kDistance<Weights>;
    }
    // Chunk j of the part's weights.
    DEVICE u32 chunk(int stage, int j) const {
        return weights + stage * kDistance<Weights> + (j * kHalfN * kRowOfTile >> 4);
    }
    DEVICE u32 half_chunk(int stage) const { return half + stage * kDistance<Weights>; }

   private:
    // Opaque, or the compiler makes them anew in each step.
    DEVICE static u32 described(u32 tile) { return warp_uniform(wgmma_descriptor_low(tile)); }
    template <template <int> class Name>
    static constexpr u32 kDistance = SharedMemory::template kBytes<Name> >> 4;  // of stages
};

// The scales of a thread's two rows of a product. kPaired: rows of the gate and of the up projection take turns.
template <bool kPaired>
struct ProductScales {
    static constexpr int kScales = kPaired ? 2 : 1, kTurn = kPairedRows / 2;  // elements
    float scale[kScales][2];

    // `chunk`: of the stage.
    template <class SharedMemory>
    DEVICE void read(SharedMemory shared, int stage, u32 row, int chunk) {
        const float token[2] = {load_shared_float(shared.token_scale(stage, row)),
                                load_shared_float(shared.token_scale(stage, row + row_offset(1)))};
#pragma unroll
        for (int i = 0; i < kScales; ++i) {
            const float of_weights = WeightTile(shared, stage).scale_of_half(kPaired ? i : chunk);
            scale[i][0] = token[0] * of_weights, scale[i][1] = token[1] * of_weights;
        }
    }
    template <int kElements>
    DEVICE void add(const float (&product)[kElements], float (&sum)[kElements]) const {
#pragma unroll
        for (int e = 0; e < kElements; ++e) sum[e] += scale[kPaired ? e / kTurn % 2 : 0][row_index(e)] * product[e];
    }
};

// The warpgroups take turns to multiply: one adds its product while the tensor cores work for the other. Without turns
// both multiply at once, and then both add.
struct MultiplyTurns {
    static constexpr int kFirstBarrier = kProducerBarrier + 1, kBothWarpgroups = kMathWarpgroups * kWarpgroup;
    int warpgroup;

    // Before the first tile, and after the last one.
    DEVICE void begin() const {
        if (warpgroup == 1) pass();
    }
    DEVICE void end() const {
        if (warpgroup == 0) take();
    }
    DEVICE void take() const { named_barrier(kFirstBarrier + warpgroup, kBothWarpgroups); }
    // When most of the product is there, as the other warpgroup takes a while to begin.
    DEVICE void pass() const { named_barrier_arrive(kFirstBarrier + (warpgroup ^ 1), kBothWarpgroups); }
};

// Adds up the products of a tile's steps. The first stage is full.
template <bool kPaired, class Part, class SharedMemory, int kStages>
DEVICE void multiply_part(SharedMemory shared, Ring<kStages>& ring, int steps, const Tile& tile, const Part& part,
                          int warpgroup, typename Part::Sums& sum, typename Part::HalfSums& half) {
    const u32 first = in_registers(ActivationScales::offset(tile.row) + warp_row(threadIdx.x) + lane_row(threadIdx.x));
    const DescribedOperands<SharedMemory> operands(shared, part, warpgroup);
    const MultiplyTurns turns{warpgroup};
#pragma unroll
    for (int i = 0; i < Part::kBlocks; ++i) clear(sum[i]);
    clear(half);
#pragma unroll 1
    for (int step = 0;; ++step) {
        const int s = ring.stage;
        const bool more = step + 1 < steps;
        bool ready;  // the next stage
        auto release_stage = [&] {
            Ring<kStages> next = ring;
            next.advance();
            // In the last step of this stage, which is full until it is released: a branch would cost more.
            ready = barrier_test_wait(shared.full(more ? next.stage : s), more ? next.phase : ring.phase);
            __syncwarp();
            barrier_arrive_by_one_lane(shared.empty(s));
            ring = next;
        };
        ProductScales<kPaired> scales;
        float product[kHalfN / 2];
        if constexpr (Part::kHasHalf) {
            // Two products at once: the first one is added while the tensor cores work on the second.
            ProductScales<kPaired> second_scales;
            float second[kHalfN / 4];
            turns.take();
            wgmma_fence();
            wgmma_issue_described(product, operands.tokens(s, 0), operands.chunk(s, 0));
            wgmma_commit();
            wgmma_fence();
            wgmma_issue_described(second, operands.tokens(s, 1), operands.half_chunk(s));
            wgmma_commit();
            scales.read(shared, s, first + part.token(0), part.chunk);
            second_scales.read(shared, s, first + part.token(1), part.chunk);
            wgmma_wait_for_earlier();
            turns.pass();
            wgmma_results_ready(product);
            scales.add(product, sum[0][0]);
            wgmma_finish(second);
            release_stage();
            second_scales.add(second, half[0]);
        } else {
#pragma unroll
            for (int i = 0; i < Part::kBlocks; ++i)
#pragma unroll
                for (int j = 0; j < Part::kChunks; ++j) {
                    turns.take();
                    wgmma_fence();
                    wgmma_issue_described<0, 3>(product, operands.tokens(s, i), operands.chunk(s, j));
                    wgmma_commit();
                    wgmma_issue_described<3, 4>(product, operands.tokens(s, i), operands.chunk(s, j));
                    wgmma_commit();
                    scales.read(shared, s, first + part.token(i), part.chunk + j);
                    wgmma_wait_for_earlier();
                    turns.pass();
                    wgmma_finish(product);
                    if (i == Part::kBlocks - 1 && j == Part::kChunks - 1) release_stage();
                    scales.add(product, sum[i][j]);
                }
        }
        if (!more) break;
        if (!ready) barrier_wait(shared.full(ring.stage), ring.phase);
    }
}
