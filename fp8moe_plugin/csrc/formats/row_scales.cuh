// float32 values of single rows of weights: scales, in the formats that have them (kScalesOfRows), and biases, in keys
// with BIAS. Once, after the last K block and before its epilogue, a kernel multiplies its float32 sums by the scales,
// then adds the biases. Where there are none, nothing is loaded.
//
// They are loaded when a tile begins, and have arrived when its sums are there: to registers where weights are the rows
// of a fragment (swap-AB), to shared memory where they are its columns, of which a thread has too many.
#pragma once
#include "device/fragment.cuh"
#include "formats/weights.cuh"

#ifdef BIAS
constexpr bool kBias = true;
#else
constexpr bool kBias = false;
#endif

// ---- rows of a fragment --------------------------------------------------------------------------------------------

// The values of kCount rows of a thread, number i at values[row(i)].
template <bool kThere, int kCount>
struct RowValues {
    float of[kCount];

    RowValues() = default;
    template <class Row>
    DEVICE RowValues(const float* values, Row row) {
        if constexpr (kThere)
#pragma unroll
            for (int i = 0; i < kCount; ++i) of[i] = values[row(i)];
    }
    // Calls apply(sum, value) for slabs of 64 rows, of which the thread has two rows each.
    template <int kSlabs, int kElements, class Apply>
    DEVICE void each(float (&sum)[kSlabs][kElements], Apply apply) const {
        static_assert(kCount == 2 * kSlabs, "a value for each row of the slabs");
        if constexpr (kThere) {
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
                for (int e = 0; e < kElements; ++e) apply(sum[slab][e], of[2 * slab + row_index(e)]);
        }
    }
};

template <int kCount>
struct RowScales : RowValues<kScalesOfRows, kCount> {
    using RowValues<kScalesOfRows, kCount>::RowValues;
    DEVICE float scaled(float value, int i) const { return kScalesOfRows ? this->of[i] * value : value; }
    template <class Sums>
    DEVICE void scale(Sums& sum) const {
        this->each(sum, [](float& s, float scale) { s *= scale; });
    }
};

template <int kCount>
struct RowBiases : RowValues<kBias, kCount> {
    using RowValues<kBias, kCount>::RowValues;
    template <class Sums>
    DEVICE void add_to(Sums& sum) const {
        this->each(sum, [](float& s, float bias) { s += bias; });
    }
};

// ---- columns of a fragment -----------------------------------------------------------------------------------------

// Each math warpgroup has the values of a tile to itself. It copies those of the next tile only after a barrier of its
// epilogue, before which all of its warps have used them.
template <int kCount>
struct StagedRowScales : Once<kScalesOfRows ? kCount : 0, 4> {};
template <int kCount>
struct StagedBiases : Once<kBias ? kCount : 0, 4> {};

// Starts to copy the values of `count` rows; by a warpgroup.
template <bool kThere>
DEVICE void copy_row_values(u32 to, const float* from, int count) {
    if constexpr (kThere)
        for (int i = threadIdx.x % kWarpgroup; i < count; i += kWarpgroup) copy_async_4(to + i * 4, from + i);
}
DEVICE void copy_row_scales(u32 to, const WeightScale* from, int count) {
    copy_row_values<kScalesOfRows>(to, from, count);
}
DEVICE void copy_biases(u32 to, const float* from, int count) { copy_row_values<kBias>(to, from, count); }

DEVICE void await_row_values(int warpgroup) {
    if constexpr (kScalesOfRows || kBias) {
        copy_async_wait();
        warpgroup_barrier(warpgroup);
    }
}

// Calls apply(sum, value) for the sums of columns whose values are at `values` of shared memory.
template <bool kThere, int kElements, class Apply>
DEVICE void each_column(u32 values, float (&sum)[kElements], Apply apply) {
    if constexpr (kThere) {
#pragma unroll
        for (int i = 0; i < kElements / 4; ++i) {
            const float2 two = load_shared_float2(values + (fragment_column(threadIdx.x) + column_offset(2 * i)) * 4);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                apply(sum[element_at(row, 2 * i)], two.x);
                apply(sum[element_at(row, 2 * i + 1)], two.y);
            }
        }
    }
}
template <int kElements>
DEVICE void scale_columns(u32 scales, float (&sum)[kElements]) {
    each_column<kScalesOfRows>(scales, sum, [](float& s, float scale) { s *= scale; });
}
template <int kElements>
DEVICE void add_to_columns(u32 biases, float (&sum)[kElements]) {
    each_column<kBias>(biases, sum, [](float& s, float bias) { s += bias; });
}

// The same for sums of 64 rows of weights, as in a tail.
template <bool kThere, int kElements, class Apply>
DEVICE void each_row(u32 values, float (&sum)[kElements], Apply apply) {
    if constexpr (kThere) {
        const u32 first = values + (warp_row(threadIdx.x) + lane_row(threadIdx.x)) * 4;
        const float of[2] = {load_shared_float(first), load_shared_float(first + row_offset(1) * 4)};
#pragma unroll
        for (int e = 0; e < kElements; ++e) apply(sum[e], of[row_index(e)]);
    }
}
template <int kElements>
DEVICE void scale_rows(u32 scales, float (&sum)[kElements]) {
    each_row<kScalesOfRows>(scales, sum, [](float& s, float scale) { s *= scale; });
}
template <int kElements>
DEVICE void add_to_rows(u32 biases, float (&sum)[kElements]) {
    each_row<kBias>(biases, sum, [](float& s, float bias) { s += bias; });
}
