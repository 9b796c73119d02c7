// A thread's part of a wgmma accumulator, which is 64 rows by kColumns columns per warpgroup.
//
// Warp w of the warpgroup has the 16 rows from 16w on (warp_row). Of these a thread has two, lane_row and the one 8
// below, and of every 8 columns two neighbouring ones, the first at fragment_column. The order of the elements, for
// columns 0 to 15 of the accumulator:
//
//       element      0    1    2    3    4    5    6    7
//       row (of 2)   0    0    1    1    0    0    1    1
//       column       +0   +1   +0   +1   +8   +9   +8   +9
#pragma once
#include "device/common.cuh"

constexpr int kWarpgroup = 128, kFragmentRows = 64;

template <int kColumns>
using Fragment = float[kColumns / 2];

// The first row of the thread's warp, the thread's first row among those, and its first column. `thread` is a thread
// index; for the latter two a lane will do.
DEVICE constexpr u32 warp_row(u32 thread) { return thread / kWarp % 4 * 16; }
DEVICE constexpr u32 lane_row(u32 thread) { return thread % kWarp / 4; }
DEVICE constexpr int fragment_column(u32 thread) { return thread % 4 * 2; }

// Row and column of element e: which of the thread's 2 rows, which of its kColumns / 4 columns.
DEVICE constexpr int row_index(int e) { return e / 2 % 2; }
DEVICE constexpr int column_index(int e) { return e / 4 * 2 + e % 2; }
// The element at that row and column.
DEVICE constexpr int element_at(int row_index, int column_index) {
    return column_index / 2 * 4 + row_index * 2 + column_index % 2;
}
// The distance of the thread's rows and columns from its first.
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
