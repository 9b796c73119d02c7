// Block-FP8 weights: e4m3, with a float32 scale for each 128 rows and 128 channels. This is what kernels know of the
// format: how a K block of a tile gets into a stage of shared memory, and what the main loops read there.
#pragma once
#include "device/ptx.cuh"
#include "pipeline/stages.cuh"

template <int kRows>
struct Weights : PerStage<kRows, kRowOfTile, kSwizzleBytes> {};
template <int kCount>
struct WeightScales : PerStage<kCount, 4> {};

// The scales of a block of 128 rows, one for each K block: `scales` is [blocks of rows, k_blocks].
DEVICE const float* scales_of_rows(const float* scales, i64 block, int k_blocks) { return scales + block * k_blocks; }

// The weights in a stage. A load starts copies to row `to` of the tile, which complete on `full`; a scale's copy
// completes with copy_async_arrive of the thread.
template <class SharedMemory>
struct WeightTile {
    static constexpr u32 kBytes = SharedMemory::template kBytes<Weights>;  // without scales
    static constexpr int kChannels = 128;                                  // of a K block

    SharedMemory shared;
    int stage;
    DEVICE WeightTile(SharedMemory shared, int stage) : shared(shared), stage(stage) {}

    // The rows of a box of `map` from `row` on.
    DEVICE void load(int to, const TensorMap* map, u32 full, int k, int row) const {
        tma_load(shared.weights(stage, to), map, full, k * kChannels, row);
    }
    // The same for all blocks of the cluster whose bits are set in `blocks`.
    DEVICE void load_to_cluster(int to, const TensorMap* map, u32 full, int k, int row, u16 blocks) const {
        tma_load_to_cluster(shared.weights(stage, to), map, full, k * kChannels, row, blocks);
    }
    // The rows of a box of a map that interleaves rows: x, y, z of its dimensions after K.
    DEVICE void load_interleaved(int to, const TensorMap* map, u32 full, int k, int x, int y, int z) const {
        tma_load_4d(shared.weights(stage, to), map, full, k * kChannels, x, y, z);
    }
    DEVICE void load_scale(int i, const float* from) const { copy_async_4(shared.weight_scale(stage, i), from); }

    // The operand of wgmma from a row on.
    DEVICE u32 operand(int row) const { return shared.weights(stage, row); }
    DEVICE float scale(int i) const { return load_shared_float(shared.weight_scale(stage, i)); }
};
