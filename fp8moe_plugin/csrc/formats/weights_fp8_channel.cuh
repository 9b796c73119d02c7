// Per-channel FP8 weights: e4m3, with a float32 scale for each row, [experts, N]. The products of K blocks are added up
// without it, and row_scales.cuh multiplies the sums.
#pragma once
#include "formats/fp8_tile.cuh"

constexpr bool kScalesOfRows = true;

template <int kCount>
struct WeightScales : PerStage<0, 4> {};

using WeightScale = float;
DEVICE const WeightScale* scales_of_rows(const WeightScale* scales, i64, int) { return scales; }

template <class SharedMemory>
struct WeightTile : Fp8Tile<SharedMemory> {
    DEVICE WeightTile(SharedMemory shared, int stage) : Fp8Tile<SharedMemory>(shared, stage) {}

    DEVICE void load_scale(int, const WeightScale*) const {}
    DEVICE float scale(int) const { return 1.f; }
    DEVICE float scale_of_half(int) const { return 1.f; }
};
