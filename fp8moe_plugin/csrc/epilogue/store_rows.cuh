// Stores 64 rows of a warpgroup in halves of 128 columns, or in half of one: as bfloat16 by way of shared memory and
// TMA, or directly from registers, as bfloat16 or float32 with an optional addend. A warpgroup's part of a tail is
// stored directly, too.
#pragma once
#include "mma/row_tile.cuh"

constexpr int kStoreN = 64;  // columns of a TMA store of bfloat16: 128 bytes, one swizzle row
constexpr int kStagedRowsOfHalf = kHalfN / kStoreN * kWarpgroupM;

// A warpgroup stages parts of 64 rows and kStoreN columns one after the other, from row `first` of the staging area on.
template <class SharedMemory>
DEVICE u32 staged_part(SharedMemory shared, int first, int part) {
    return shared.staging(first + part * kWarpgroupM);
}

template <class SharedMemory, int kElements>
DEVICE void stage_half(SharedMemory shared, int first, const float (&sum)[kElements]) {
    int lane = threadIdx.x % 32, row = warp_row(threadIdx.x) + lane % 16;
#pragma unroll
    for (int i = 0; i < kElements / 4; i += 2) {
        int chunk = i + lane / 16;  // of 8 columns, 16 bytes
        u32 to = staged_part(shared, first, chunk / 8) + row * 128 + (chunk % 8 ^ row % 8) * 16;
        store_matrix_x4(to, pack_bf16x2(sum[4 * i], sum[4 * i + 1]), pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]),
                        pack_bf16x2(sum[4 * i + 4], sum[4 * i + 5]), pack_bf16x2(sum[4 * i + 6], sum[4 * i + 7]));
    }
}

// For the last rows of an expert: TMA would store a whole box, and overwrite rows of the next expert.
template <int kColumns, class SharedMemory>
DEVICE void copy_half(SharedMemory shared, int first, u16* d, int n, int row, int rows, int column) {
    constexpr int kChunks = kColumns / 8;
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
        int r = i / kChunks, chunk = i % kChunks;
        if (column + chunk * 8 < n)
            *reinterpret_cast<uint4*>(d + i64(row + r) * n + column + chunk * 8) =
                load_shared_16(staged_part(shared, first, chunk / 8) + r * 128 + (chunk % 8 ^ r % 8) * 16);
    }
}

// kAtOnce: halves for which the staging area has room.
template <int kAtOnce, int kCount, int kElements, class SharedMemory>
DEVICE void store_staged(SharedMemory shared, int first, const TensorMap* d_map, u16* d, int n, int row, int rows,
                         int column, int warpgroup, const float (&sum)[kCount][kElements]) {
    constexpr int kColumns = kElements * 2;  // of a fragment
    bool elected = threadIdx.x % 128 == 0;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kAtOnce, column += kAtOnce * kColumns) {
        if (elected) tma_store_wait_read();
        warpgroup_barrier(warpgroup);  // the staging buffers are free
#pragma unroll
        for (int half = 0; half < kAtOnce; ++half)
            stage_half(shared, first + half * kStagedRowsOfHalf, sum[begin + half]);
        fence_proxy_async();
        warpgroup_barrier(warpgroup);  // the staging buffers are full
        if (rows < kWarpgroupM) {
#pragma unroll 1
            for (int half = 0; half < kAtOnce; ++half)
                copy_half<kColumns>(shared, first + half * kStagedRowsOfHalf, d, n, row, rows,
                                    column + half * kColumns);
        } else if (elected) {
#pragma unroll
            for (int part = 0; part < kAtOnce * (kColumns / kStoreN); ++part)
                tma_store(d_map, staged_part(shared, first, part), column + part * kStoreN, row);
            tma_store_commit();
        }
    }
}

template <bool kFloat>
DEVICE void store_direct(void* d, const void* c, int n, int row, int rows, int column, const Fragment<kHalfN>& sum) {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kHalfN / 2; i += 2) {
        int r = first + i / 2 % 2 * 8, x = column + i / 4 * 8 + lane % 4 * 2;
        if (r >= rows || x >= n) continue;
        i64 at = (i64(row + r) * n + x) / 2;
        float2 value = make_float2(sum[i], sum[i + 1]);
        if (kFloat) {
            float2 addend = c ? static_cast<const float2*>(c)[at] : make_float2(0.f, 0.f);
            static_cast<float2*>(d)[at] = make_float2(value.x + addend.x, value.y + addend.y);
        } else {
            float2 addend = unpack_bf16x2(c ? static_cast<const u32*>(c)[at] : 0);
            static_cast<u32*>(d)[at] = pack_bf16x2(value.x + addend.x, value.y + addend.y);
        }
    }
}

template <bool kFloat>
DEVICE void store_tail_direct(void* d, const void* c, int n, int row, int rows, int column, const Tail& sum) {
    int lane = threadIdx.x % 32, first = column + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTailRows / 2; ++i) {
        int r = i / 4 * 8 + lane % 4 * 2 + i % 2, x = first + i / 2 % 2 * 8;
        if (r >= rows || x >= n) continue;
        i64 at = i64(row + r) * n + x;
        if (kFloat)
            static_cast<float*>(d)[at] = sum[i] + (c ? static_cast<const float*>(c)[at] : 0.f);
        else
            static_cast<u16*>(d)[at] = bf16_bits(sum[i] + (c ? bf16_value(static_cast<const u16*>(c)[at]) : 0.f));
    }
}
