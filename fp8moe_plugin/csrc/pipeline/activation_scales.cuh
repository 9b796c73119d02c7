// The scales of a tile's rows of activations, where these are contiguous.
#pragma once
#include "pipeline/tile.cuh"

// The scales of activations, rows contiguous: (expert, row, k block) is at expert * expert_stride + row + k * k_stride.
// `data` and the strides are multiples of 16 bytes, but rows start anywhere. A tile's scales are therefore copied from
// the multiple of four rows at or before its first row to the one at or after its end, into kBlockM + kSlack floats.
struct ActivationScales {
    static constexpr int kSlack = 4;
    const float* data;
    int expert_stride, k_stride;

    DEVICE static int offset(int row) { return row % 4; }  // of the tile's first row in the copy
    DEVICE static u32 bytes(const Tile& tile) { return (offset(tile.row) + tile.rows + 3) / 4 * 16; }
    DEVICE const float* of_tile(const Tile& tile) const {
        return data + i64(tile.expert) * expert_stride + tile.row - offset(tile.row);
    }
};
