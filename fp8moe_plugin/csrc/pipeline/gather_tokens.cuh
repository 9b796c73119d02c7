// The tokens of a swap-AB tile of many rows, gathered by a warpgroup together: a warp alone would take longer to fill a
// stage than the few stages that fit let it.
#pragma once
#include "pipeline/producer.cuh"

template <int kTokens>
struct GatheredTokens {
    static constexpr int kBlockBytes = 128, kChunks = kBlockBytes / 16, kThreads = 128,
                         kRowsAtOnce = kThreads / kChunks;
    static constexpr int kCopies = kTokens / kRowsAtOnce, kScales = ceil_div(kTokens, kThreads);
    static constexpr u32 kNoRow = ~0u;
    const uint4* x;                      // e4m3 [T, K]
    const float* scales;                 // [T, K / 128]
    u32 from[kCopies], of_row[kScales];  // first elements; kNoRow: past the tile

    DEVICE GatheredTokens(const uint4* x, const float* scales, const int* a_rows, const Tile& tile, int k_blocks)
        : x(x), scales(scales) {
        const int thread = threadIdx.x % kThreads;
        auto block_of = [&](int row) { return row < tile.rows ? u32(a_rows[tile.row + row]) * k_blocks : kNoRow; };
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const u32 block = block_of(i * kRowsAtOnce + thread / kChunks);
            from[i] = block == kNoRow ? kNoRow : block * kChunks + thread % kChunks;
        }
#pragma unroll
        for (int i = 0; i < kScales; ++i) of_row[i] = block_of(i * kThreads + thread);
    }
    template <class SharedMemory>
    DEVICE void start(SharedMemory shared, int stage, int k) const {
        const int thread = threadIdx.x % kThreads, row = thread / kChunks, chunk = thread % kChunks;
        const uint4* block = in_registers(x + k * kChunks);
        const u32 to = shared.tokens(stage, row) + (chunk ^ row % SWIZZLE_ROWS) * 16;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            if (from[i] != kNoRow) copy_async_16(to + i * kRowsAtOnce * kBlockBytes, block + from[i]);
        const float* scale = in_registers(scales + k);
#pragma unroll
        for (int i = 0; i < kScales; ++i)
            if (of_row[i] != kNoRow) copy_async_4(shared.token_scale(stage, i * kThreads + thread), scale + of_row[i]);
    }
};
