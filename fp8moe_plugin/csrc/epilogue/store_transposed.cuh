// Stores a transposed (swap-AB) result: a warpgroup's 64 channels by a few tokens.
#pragma once
#include "device/fragment.cuh"
#include "device/ptx.cuh"

// Transposes it in shared memory. Rows of the fragment are channels, columns are tokens. `staging` has room for kTokens
// rows of 128 bytes, swizzled, and belongs to this warpgroup. `row_of(token)` is the address of its row, of n channels.
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

// The same without shared memory: a warp transposes its 16 channels in registers. That takes more instructions from 24
// tokens on, but leaves the shared memory to stages. A transposed matrix of 8 channels by 8 tokens leaves two channels
// of a token to a thread. Neighbours exchange two, so that each stores four, and four threads all 16, a sector.
template <int kTokens, class RowOf>
DEVICE void store_transposed_in_registers(RowOf row_of, int n, int rows, int column, const float (&sum)[kTokens / 2]) {
    int lane = lane_of_warp();
    asm volatile("" : "+r"(lane));  // what depends on it takes registers only here, not already in a caller's loop
    const bool odd = lane % 2;      // has channels of the second matrix
    const int channel = column + warp_row(threadIdx.x) + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
        const u32 first = transpose_matrix(pack_bf16x2(sum[4 * i], sum[4 * i + 1]));
        const u32 second = transpose_matrix(pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]));
        const u32 other = __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
        const int token = i * 8 + lane / 4;
        if (token < rows && channel < n)
            *reinterpret_cast<uint2*>(row_of(token) + channel) =
                odd ? make_uint2(other, second) : make_uint2(first, other);
    }
}
