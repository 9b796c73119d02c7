// Stores rows into the windows of their tokens' ranks: each by a bulk copy from shared memory, which drains while the
// next tile is computed.
#pragma once
#include "epilogue/store_rows.cuh"
#include "ranks/window.cuh"

struct WindowRows {
    const Window* window;
    const int* pairs;  // of each row, the number of its (token, expert) pair among those of all ranks
    int all_pairs, n;

    DEVICE u16* of_pair(u32 pair) const {
        const u32 pairs_of_rank = u32(all_pairs) / u32(window->ranks);
        return window->in_window<u16>(pair / pairs_of_rank, window->sums) + i64(pair % pairs_of_rank) * n;
    }
};

constexpr int kRowsOfWarp = 16;
constexpr int kRowPadding = 16;  // bytes after each staged row, so that eight rows begin in different banks

// Stages half of each of the warp's rows. The first 16 lanes have the addresses of the rows, the others 16 bytes more.
template <int kElements>
DEVICE void stage_rows(u32 row, const float (&sum)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements / 4; i += 2)
        store_matrix_x4(row + i * 16, pack_bf16x2(sum[4 * i], sum[4 * i + 1]),
                        pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]), pack_bf16x2(sum[4 * i + 4], sum[4 * i + 5]),
                        pack_bf16x2(sum[4 * i + 6], sum[4 * i + 7]));
}

// Each warp stages and pushes its own 16 rows, and waits for no other. The staging area of the warpgroup begins at
// `first` and has room for rows of kMostHalves; kAtOnce of the kCount halves are staged at once.
template <int kMostHalves, int kAtOnce, int kCount, int kElements, class SharedMemory>
DEVICE void push_staged(SharedMemory shared, int first, const WindowRows& to, int row, int rows, int column,
                        const float (&sum)[kCount][kElements]) {
    constexpr int kColumns = kElements * 2;  // of a fragment
    constexpr u32 kPitch = kMostHalves * kHalfN * 2 + kRowPadding;
    int lane = lane_of_warp();
    asm volatile("" : "+r"(lane));  // or the compiler keeps addresses in registers while tiles are computed
    const int r = warp_row(threadIdx.x) + lane % kRowsOfWarp;
    const u32 staged = shared.staging(first) + r * kPitch + lane / kRowsOfWarp * 16;
    const int pair = lane < kRowsOfWarp && r < rows ? to.pairs[row + r] : -1;  // arrives while the rows are staged
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kAtOnce, column += kAtOnce * kColumns) {
        tma_store_wait_read();
        __syncwarp();  // the staging buffer is free
#pragma unroll
        for (int half = 0; half < kAtOnce; ++half) stage_rows(staged + half * kColumns * 2, sum[begin + half]);
        fence_proxy_async();
        __syncwarp();  // the staging buffer is full
        const int columns = min(kAtOnce * kColumns, to.n - column);
        if (pair >= 0 && columns > 0) bulk_store_to_peer(to.of_pair(pair) + column, staged, columns * 2);
        tma_store_commit();
    }
}
