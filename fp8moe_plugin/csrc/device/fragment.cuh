// What a thread holds of a wgmma accumulator, 64 rows by kColumns columns of a warpgroup.
//
// Warp w of the warpgroup has 16 rows from warp_row on, 16w. Of these a thread has two, lane_row and the one 8 below,
// and in each row a pair of neighbouring columns out of every 8, the first at fragment_column. The order of the
// elements, for columns 0 to 15 of the accumulator:
//
//       element      0    1    2    3    4    5    6    7
//       row (of 2)   0    0    1    1    0    0    1    1
//       column       +0   +1   +0   +1   +8   +9   +8   +9
#pragma once
#include "device/common.cuh"

constexpr int kWarpgroup = 128, kFragmentRows = 64;

template <int kColumns>
using Fragment = float[kColumns / 2];

// The first row of the thread's warp, the thread's first row among those, and its first column (a lane will do, too).
DEVICE constexpr u32 warp_row(u32 thread) { return thread / kWarp % 4 * 16; }
DEVICE constexpr u32 lane_row(u32 thread) { return thread % kWarp / 4; }
DEVICE constexpr int fragment_column(u32 thread) { return thread % 4 * 2; }

// Row and column of element e: which of the thread's 2 rows, which of its kColumns / 4 columns.
DEVICE constexpr int row_index(int e) { return e / 2 % 2; }
DEVICE constexpr int column_index(int e) { return e / 4 * 2 + e % 2; }
// The element in these.
DEVICE constexpr int element_at(int row_index, int column_index) {
    return column_index / 2 * 4 + row_index * 2 + column_index % 2;
}
// Distance of the thread's rows, and of its columns, from its first.
DEVICE constexpr int row_offset(int row_index) { return row_index * 8; }
DEVICE constexpr int column_offset(int column_index) { return column_index / 2 * 8 + column_index % 2; }

template <int kCount>
DEVICE void clear(float (&sum)[kCount]) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum[e] = 0.f;
}
template <int kCount, int kElements>
DEVICE void clear(float (&sum)[kCount][kElements]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) clear(sum[i]);
}
