// The main loop of the math warpgroups for row tiles: rows of a fragment are tokens, its columns rows of weights.
//
// A tail is multiplied the other way round (swap-AB): its 16 tokens are the N operand, and each warpgroup takes 64 of
// every 128 rows of weights as the M operand. A tile of their own would load all of the weights once more.
#pragma once
#include "device/wgmma.cuh"
#include "pipeline/row_tile.cuh"

using Tail = Fragment<kTailRows>;

// The scales of a tail's tokens, by the columns of a fragment.
struct TailScales {
    float token[kTailRows / 4];

    template <class SharedMemory>
    DEVICE void read(SharedMemory shared, int s, int row) {
#pragma unroll
        for (int i = 0; i < kTailRows / 4; ++i)
            token[i] = load_shared_float(shared.token_scale(s, row + column_offset(i)));
    }
    DEVICE void add(float weight_scale, Tail& product, Tail& sum) const {
        wgmma_results_ready(product);
#pragma unroll
        for (int e = 0; e < kTailRows / 2; ++e) sum[e] += token[column_index(e)] * weight_scale * product[e];
    }
};

// Multiplies 64 rows by kColumns columns of kCount halves, from block of rows `row_block`, half `first_half` and
// `column` of each half on; and the tail. kGathered: tokens were copied by ordinary writes, and their scales begin with
// the tile's first.
//
// The last half releases the stage, where TMA would overwrite the tail's scales while they are being read. So it reads
// them before the wait for wgmma, when registers are scarce; the kernel that has none left ends its reads with a fence.
template <int kCount, int kColumns, bool kHasTail, bool kGathered, class SharedMemory, class Rings, int kHalves>
DEVICE void multiply_row_tile(SharedMemory shared, Rings& rings, int k_blocks, const Tile& tile, int row_block,
                              int first_half, int column, Fragment<kColumns> (&sum)[kCount], Tail (&tail)[kHalves]) {
    int first = kGathered ? 0 : ActivationScales::offset(tile.row),
        tail_row = first + kBlockM + fragment_column(threadIdx.x);
    int row = first + row_block * kWarpgroupM + warp_row(threadIdx.x) + lane_row(threadIdx.x);
    constexpr bool kRegistersForScales = !(kScalesOfRows && Rings::kKeepsWeights);
    clear(sum);
    clear(tail);

    rings.keep_weights(tile, k_blocks);
    bool ready = false;  // whether the next stage is known to be full
    for (int k = 0; k < k_blocks; ++k) {
        int s = rings.tokens.stage;
        const WeightTile weights(shared, rings.weights_stage());
        if (!ready) barrier_wait(shared.full(s), rings.tokens.phase);
        if (kGathered) fence_proxy_async();
        float token_scale[2] = {load_shared_float(shared.token_scale(s, row)),
                                load_shared_float(shared.token_scale(s, row + 8))};
#pragma unroll
        for (int half = 0; half < kCount; ++half) {
            Fragment<kColumns> product;
            Tail tail_product;
            wgmma_fence();
            wgmma_issue(product, shared.tokens(s, row_block * kWarpgroupM),
                        weights.operand((first_half + half) * kHalfN + column));
            if (kHasTail)
                wgmma_issue(tail_product, weights.operand(half * kHalfN + row_block * kWarpgroupM),
                            shared.tokens(s, kBlockM));
            wgmma_commit();
            float weight_scale = weights.scale_of_half(first_half + half);
            const bool last = half == kCount - 1, before_wait = last && kRegistersForScales;
            TailScales tail_scales;
            if (kHasTail && before_wait) tail_scales.read(shared, s, tail_row);
            wgmma_finish(product);
            if constexpr (kHasTail) {
                if (!before_wait) tail_scales.read(shared, s, tail_row);
                if (last && !before_wait) fence_proxy_async();
                tail_scales.add(weight_scale, tail_product, tail[half]);
            }
            float scale[2] = {token_scale[0] * weight_scale, token_scale[1] * weight_scale};
            if (last) {
                release(shared, s);
                rings.advance();
                ready = k + 1 < k_blocks && barrier_try_wait(shared.full(rings.tokens.stage), rings.tokens.phase);
            }
#pragma unroll
            for (int e = 0; e < kColumns / 2; ++e) sum[half][e] += scale[row_index(e)] * product[e];
        }
    }
}

// For a warpgroup without rows: only releases the stages.
template <class SharedMemory, int kStages>
DEVICE void skip_row_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks) {
    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        barrier_wait(shared.full(ring.stage), ring.phase);
        release(shared, ring.stage);
    }
}
