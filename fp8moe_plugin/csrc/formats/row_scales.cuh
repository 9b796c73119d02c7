// Scales of single rows of weights, in the formats that have them (kScalesOfRows): a kernel multiplies its float32 sums
// by them once, after the last K block and before its epilogue. In other formats nothing is loaded, and the scale is 1.
//
// They are loaded when a tile begins, and have arrived when its sums are there: to registers where weights are the rows
// of a fragment (swap-AB), to shared memory where they are its columns, of which a thread has too many.
#pragma once
#include "device/fragment.cuh"
#include "formats/weights.cuh"

// ---- rows of a fragment --------------------------------------------------------------------------------------------

// The scales of kCount rows of a thread, number i at scales[row(i)].
template <int kCount>
struct RowScales {
    float of[kCount];

    RowScales() = default;
    template <class Row>
    DEVICE RowScales(const WeightScale* scales, Row row) {
        if constexpr (kScalesOfRows)
#pragma unroll
            for (int i = 0; i < kCount; ++i) of[i] = scales[row(i)];
    }
    DEVICE float scaled(float value, int i) const { return kScalesOfRows ? of[i] * value : value; }
    // Of slabs of 64 rows, the thread's two rows of each.
    template <int kSlabs, int kElements>
    DEVICE void scale(float (&sum)[kSlabs][kElements]) const {
        static_assert(kCount == 2 * kSlabs, "a scale for each row of the slabs");
        if constexpr (kScalesOfRows) {
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
                for (int e = 0; e < kElements; ++e) sum[slab][e] *= of[2 * slab + row_index(e)];
        }
    }
};

// ---- columns of a fragment -----------------------------------------------------------------------------------------

// Each math warpgroup has the scales of a tile to itself. It copies those of the next tile only after a barrier of its
// epilogue, before which all of its warps have scaled their sums.
template <int kCount>
struct StagedRowScales : Once<kScalesOfRows ? kCount : 0, 4> {};

// Starts to copy the scales of `count` rows; by a warpgroup.
DEVICE void copy_row_scales(u32 to, const WeightScale* from, int count) {
    if constexpr (kScalesOfRows)
        for (int i = threadIdx.x % kWarpgroup; i < count; i += kWarpgroup) copy_async_4(to + i * 4, from + i);
}

DEVICE void await_row_scales(int warpgroup) {
    if constexpr (kScalesOfRows) {
        copy_async_wait();
        warpgroup_barrier(warpgroup);
    }
}

// Multiplies the sums of columns whose scales are at `scales` of shared memory.
template <int kElements>
DEVICE void scale_columns(u32 scales, float (&sum)[kElements]) {
    if constexpr (kScalesOfRows) {
#pragma unroll
        for (int i = 0; i < kElements / 4; ++i) {
            const float2 two = load_shared_float2(scales + (fragment_column(threadIdx.x) + column_offset(2 * i)) * 4);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                sum[element_at(row, 2 * i)] *= two.x;
                sum[element_at(row, 2 * i + 1)] *= two.y;
            }
        }
    }
}

// The same for sums of 64 rows of weights, as in a tail.
template <int kElements>
DEVICE void scale_rows(u32 scales, float (&sum)[kElements]) {
    if constexpr (kScalesOfRows) {
        const u32 first = scales + (warp_row(threadIdx.x) + lane_row(threadIdx.x)) * 4;
        const float of[2] = {load_shared_float(first), load_shared_float(first + row_offset(1) * 4)};
#pragma unroll
        for (int e = 0; e < kElements; ++e) sum[e] *= of[row_index(e)];
    }
}
