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

// The same for slabs of 64 channels, one after the other, at most kPart tokens at once. `staging` has room for as many.
template <int kTokens, int kPart, int kSlabs, class RowOf>
DEVICE void store_transposed_in_parts(u32 staging, int warpgroup, RowOf row_of, int n, int rows, int column,
                                      const float (&sum)[kSlabs][kTokens / 2]) {
    asm volatile("" : "+r"(rows));  // what depends on it takes registers only here, not already in a caller's loop
#pragma unroll
    for (int first = 0; first < kTokens; first += kPart)
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
            float part[kPart / 2];
#pragma unroll
            for (int e = 0; e < kPart / 2; ++e) part[e] = first / 2 + e < kTokens / 2 ? sum[slab][first / 2 + e] : 0.f;
            auto row_from = [&](int token) { return row_of(first + token); };
            store_transposed<kPart>(staging, warpgroup, row_from, n, min(rows - first, kPart), column + slab * 64,
                                    part);
        }
}
