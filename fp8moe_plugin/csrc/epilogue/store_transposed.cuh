// Stores a transposed (swap-AB) result: a warpgroup's 64 channels by a few tokens, transposed in shared memory.
#pragma once
#include "device/ptx.cuh"

// Rows of the fragment are channels, columns are tokens. `staging` has room for kTokens rows of 128 bytes, swizzled,
// and belongs to this warpgroup. `row_of(token)` is the address of its row, of n channels.
template <int kTokens, class RowOf>
DEVICE void store_transposed(u32 staging, int warpgroup, RowOf row_of, int n, int rows, int column,
                             const float (&sum)[kTokens / 2]) {
    constexpr int kChunks = 8;  // of 8 channels, 16 bytes
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    auto chunk_at = [&](int token, int chunk) { return staging + token * 128 + (chunk ^ token % 8) * 16; };
    warpgroup_barrier(warpgroup);  // the staging buffer is free
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i)
        store_matrix_x2_transposed(chunk_at(i * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                                   pack_bf16x2(sum[4 * i], sum[4 * i + 1]),
                                   pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]));
    warpgroup_barrier(warpgroup);  // the staging buffer is full
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
        int token = i / kChunks, chunk = i % kChunks;
        if (column + chunk * 8 < n)
            *reinterpret_cast<uint4*>(row_of(token) + column + chunk * 8) = load_shared_16(chunk_at(token, chunk));
    }
}
