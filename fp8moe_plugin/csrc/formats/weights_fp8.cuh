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
using WeightScale = float;
DEVICE const WeightScale* scales_of_rows(const WeightScale* scales, i64 block, int k_blocks) {
    return scales + block * k_blocks;
}

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
    // The 256 rows of 128 channels of the gate and up projections, 8 rows of each in turn; `block` counts 128 rows of
    // the former. `map`: gate_up_map of fp8moe_plugin/launches/sm90/tensor_maps.py.
    DEVICE void load_gate_and_up(const TensorMap* map, u32 full, int k, int block) const {
        tma_load_4d(shared.weights(stage, 0), map, full, k * kChannels, 0, 0, block * (128 / 8));
    }
    // 64 rows of block `block` of 128 rows, by the order of interleaved_map there.
    DEVICE void load_interleaved(int to, const TensorMap* map, u32 full, int k, int block, int half) const {
        tma_load_4d(shared.weights(stage, to), map, full, k * kChannels, 0, half * 2, block * 4);
    }
    DEVICE void load_scale(int i, const WeightScale* from) const { copy_async_4(shared.weight_scale(stage, i), from); }

    // The rows from `row` on as an operand of wgmma_issue: here their address. Swap-AB takes operands of any type for
    // which wgmma_issue has an overload, such as 64 rows that are loaded and decoded to registers.
    DEVICE u32 operand(int row) const { return shared.weights(stage, row); }
    // 1 in a format with one scale for each row, whose sums are multiplied once, after the main loop.
    DEVICE float scale(int i) const { return load_shared_float(shared.weight_scale(stage, i)); }
    // The same for row tiles. With the stage apart, it takes registers that grouped_gemm does not have.
    DEVICE float scale_of_half(int half) const {
        constexpr int kHalves = SharedMemory::template kBytes<WeightScales> / 4;
        return load_shared_float(shared.template at<WeightScales>(stage * kHalves + half));
    }
};
