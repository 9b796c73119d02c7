// Which output tiles a block computes, and in which order. The table of row tiles is described in ops/route.py.
#pragma once
#include "ptx.cuh"

struct Tile {
    int expert;
    int row;     // first row in A and D
    int rows;    // how many of its rows count
    int column;  // index along N, in tiles
};

// Hands each block every gridDim.x-th tile. Row tiles of an expert are neighbours, then its columns follow,
// so that a tile of weights is read from device memory once and from L2 by the expert's other row tiles.
template <int kBlockM>
struct TileWalk {
    const int4* table;  // null: one group, rows 0 to m
    int m, column_tiles, total, next;
    int4 upcoming;  // loaded one tile ahead, to hide its latency

    DEVICE TileWalk(const int4* table, const int* num_tiles, int m, int column_tiles)
        : table(table), m(m), column_tiles(column_tiles), next(blockIdx.x) {
        total = column_tiles * (table ? *num_tiles : (m + kBlockM - 1) / kBlockM);
        prefetch();
    }
    DEVICE void prefetch() {
        if (next < total) upcoming = table ? table[next / column_tiles] : make_int4(0, 0, m, 0);
    }
    DEVICE bool advance(Tile& tile) {
        if (next >= total) return false;
        int expert = upcoming.x, begin = upcoming.y, end = upcoming.z, first = upcoming.w;
        int row_tiles = (end - begin + kBlockM - 1) / kBlockM, index = next - first * column_tiles;
        tile.expert = expert;
        tile.row = begin + index % row_tiles * kBlockM;
        tile.rows = min(kBlockM, end - tile.row);
        tile.column = index / row_tiles;
        next += gridDim.x;
        prefetch();
        return true;
    }
};

// A ring of shared-memory stages: which one is current, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
    int stage = 0;
    u32 phase = 0;
    DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Where the scales of activations are: element (expert, row, k block) at the three strides, in floats.
struct ActivationScales {
    const float* data;
    int expert_stride, row_stride, k_stride;
    DEVICE const float* of_row(int expert, int row) const {
        return data + i64(expert) * expert_stride + i64(row) * row_stride;
    }
};
