// The producer of row tiles: one warp that fills the stages by TMA.
#pragma once
#include "pipeline/producer.cuh"
#include "pipeline/row_tile.cuh"
#include "pipeline/tile_queue.cuh"

// For K of at most this many steps, boxes of kTailRows tokens are faster than boxes of 64
// (docs/experiments/008-staging-and-boxes.md).
constexpr int kNarrowBoxSteps = 2;

// Fills a stage for each K block of the queue's tile. `weights` has load(tile, full, k) and load_scales(tile, k), which
// start the copies of a K block to a WeightTile.
template <class SharedMemory, int kStages, bool kKeepWeights, class Queue, class Loads>
DEVICE void load_row_tile(SharedMemory shared, Rings<kStages, kKeepWeights>& rings, const Operands& in, Queue& queue,
                          const Tile& tile, const Loads& weights) {
    const bool kept = rings.keep_weights(tile, in.k_blocks);
    const bool narrow = kKeepWeights || in.k_blocks <= kNarrowBoxSteps;
    const TensorMap* tokens = narrow ? in.narrow_tokens : in.tokens;
    int box = narrow ? kTailRows : kWarpgroupM, rows = narrow ? tile.rows : min(tile.rows, kBlockM);
    rows = (rows + box - 1) / box * box;
    int tail_rows = !narrow && tile.rows > kBlockM ? kTailRows : 0;
    u32 scale_bytes = ActivationScales::bytes(tile);
    u32 bytes = (rows + tail_rows) * kBlockK + (kept ? 0 : WeightTile<SharedMemory>::kBytes);
    bytes += scale_bytes;
    const float* token_scales = in.token_scales.of_tile(tile);
    fill_stages<wait_by_warp>(shared, rings.tokens, 0, in.k_blocks, [&](int k, int s, u32 full) {
        if (lane_of_warp() == 0) {
            int weights_stage = kKeepWeights ? rings.weights.stage : s;
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(full, bytes);
            if (!kept) weights.load({shared, weights_stage}, full, k);
#pragma unroll 1
            for (int row = 0; row < rows; row += box)
                tma_load(shared.tokens(s, row), tokens, full, k * kBlockK, tile.row + row);
            if (tail_rows > 0)
                tma_load(shared.tokens(s, kBlockM), in.narrow_tokens, full, k * kBlockK, tile.row + kBlockM);
            bulk_load(shared.token_scale(s, 0), token_scales, full, scale_bytes);
            if (!kept) weights.load_scales({shared, weights_stage}, k);
            rings.weights.advance();
            copy_async_arrive(full);
        }
        token_scales += in.token_scales.k_stride;
        queue.prepare_next(k);
    });
}
