// Block-FP8 weights: e4m3, with a float32 scale for each 128 rows and 128 channels. This is what kernels know of the
// format.
#pragma once
#include "formats/fp8_tile.cuh"

constexpr bool kScalesOfRows = false;  // see row_scales.cuh

template <int kCount>
struct WeightScales : PerStage<kCount, 4> {};

// The scales of a block of 128 rows, one for each K block: `scales` is [blocks of rows, k_blocks].
using WeightScale = float;
DEVICE const WeightScale* scales_of_rows(const WeightScale* scales, i64 block, int pitch) {
    return scales + block * pitch;
}

template <class SharedMemory>
struct WeightTile : Fp8Tile<SharedMemory> {
    DEVICE WeightTile(SharedMemory shared, int stage) : Fp8Tile<SharedMemory>(shared, stage) {}

    // A copy that completes with copy_async_arrive of the thread.
    DEVICE void load_scale(int i, const WeightScale* from) const {
        copy_async_4(this->shared.weight_scale(this->stage, i), from);
    }
    // 1 in a format with one scale for each row.
    DEVICE float scale(int i) const { return load_shared_float(this->shared.weight_scale(this->stage, i)); }
    // The same for row tiles. With the stage apart, it takes registers that grouped_gemm does not have.
    DEVICE float scale_of_half(int half) const {
        constexpr int kHalves = SharedMemory::template kBytes<WeightScales> / 4;
        return load_shared_float(this->shared.template at<WeightScales>(this->stage * kHalves + half));
    }
};
