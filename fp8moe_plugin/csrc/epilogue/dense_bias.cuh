// The bias of a dense layer, bfloat16 [N], in keys with BIAS: added to the float32 sums of a tile, whose columns are
// rows of weights. It is copied to shared memory when the tile begins, two columns in a word, with the scales of
// row_scales.cuh.
#pragma once
#include "formats/row_scales.cuh"

template <int kColumns>
struct StagedDenseBias : Once<kBias ? kColumns / 2 : 0, 4> {};

DEVICE void copy_dense_bias(u32 to, const u16* from, int columns) {
    copy_row_values<kBias>(to, reinterpret_cast<const float*>(from), columns / 2);
}

template <int kElements>
DEVICE void add_dense_bias(u32 bias, float (&sum)[kElements]) {
    if constexpr (kBias) {
#pragma unroll
        for (int i = 0; i < kElements / 4; ++i) {
            const u32 at = bias + (fragment_column(threadIdx.x) + column_offset(2 * i)) * 2;
            const float2 two = unpack_bf16x2(__float_as_uint(load_shared_float(at)));
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                sum[element_at(row, 2 * i)] += two.x;
                sum[element_at(row, 2 * i + 1)] += two.y;
            }
        }
    }
}
