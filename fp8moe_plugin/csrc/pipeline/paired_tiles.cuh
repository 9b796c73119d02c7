// The tiles of the thread blocks of a cluster: row tiles of the same columns, one after the other.
#pragma once
#include "device/common.cuh"

// The tile of a thread block, by its first row and column; each cluster computes every n-th pair of tiles. The pairs of
// a band have the same columns one after the other, so that clusters that run at the same time read the same rows and
// columns, about as many of each, and L2 gets them from memory once per band. Where K is short, more rows stay in L2.
template <int kTileM, int kTileN, int kCluster>
struct PairedTiles {
    static constexpr int kBandPairs = 8, kShortBandPairs = 16, kShort = 16;  // at most; K blocks

    int m, column_tiles, row_pairs, band, count, index = blockIdx.x / kCluster, row, column;

    DEVICE PairedTiles(int m, int n, int k_blocks) : m(m) {
        row_pairs = ceil_div(ceil_div(m, kTileM), kCluster);
        column_tiles = ceil_div(n, kTileN);
        band = ceil_div(row_pairs, ceil_div(row_pairs, k_blocks <= kShort ? kShortBandPairs : kBandPairs));
        count = row_pairs * column_tiles;
        place();
    }
    DEVICE void place() {
        if (!more()) return;
        int first = index / (band * column_tiles) * band, in_band = min(band, row_pairs - first);
        int local = index - first * column_tiles;
        row = ((first + local % in_band) * kCluster + blockIdx.x % kCluster) * kTileM;
        column = local / in_band * kTileN;
    }
    DEVICE bool more() const { return index < count; }
    DEVICE void advance() {
        index += gridDim.x / kCluster;
        place();
    }
    DEVICE int rows() const { return min(kTileM, m - row); }  // not positive: there is none, but for the other block
};
