// Where grouped_gemm.cu stores its rows: in a matrix or, with PUSHED, in the windows of their tokens' ranks.
#pragma once
#include "epilogue/store_rows.cuh"
#ifdef PUSHED
#include "epilogue/push_rows.cuh"
#endif

struct Result {
    const TensorMap* map;
    void* d;
    const void* c;
    int m, n;
    const float* bias;

#ifdef PUSHED
    DEVICE WindowRows rows() const { return {static_cast<const Window*>(d), static_cast<const int*>(c), m, n}; }
    DEVICE u16* row(int i) const { return rows().of_pair(rows().pairs[i]); }
#else
    DEVICE u16* row(int i) const { return static_cast<u16*>(d) + i64(i) * n; }
#endif

    // Stores a warpgroup's sums as bfloat16, by way of the staging area from row `first` on, which has room for
    // kMostHalves.
    template <int kMostHalves, int kCount, int kElements, class SharedMemory>
    DEVICE void store(SharedMemory shared, int first, int row, int rows_there, int column, int warpgroup,
                      const float (&sum)[kCount][kElements]) const {
        constexpr int kAtOnce = kCount < kMostHalves ? kCount : kMostHalves;
#ifdef PUSHED
        push_staged<kMostHalves, kAtOnce>(shared, first, rows(), row, rows_there, column, sum);
#else
        store_staged<kAtOnce>(shared, first, map, static_cast<u16*>(d), n, row, rows_there, column, warpgroup, sum);
#endif
    }
};

// Rows of a warpgroup's staging area, which has `rows` without padding, and its threads that store by TMA.
#ifdef PUSHED
DEVICE constexpr int staged_rows(int rows) { return rows + kWarpgroupM * kRowPadding / kRowOfTile; }
DEVICE constexpr int storing_threads() { return kWarpgroup; }
#else
DEVICE constexpr int staged_rows(int rows) { return rows; }
DEVICE constexpr int storing_threads() { return 1; }
#endif
