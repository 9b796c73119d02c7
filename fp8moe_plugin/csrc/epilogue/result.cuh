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
};

// Rows of a warpgroup's staging area, which has `rows` without padding, and its threads that store by TMA.
#ifdef PUSHED
DEVICE constexpr int staged_rows(int rows) { return rows + kWarpgroupM * kRowPadding / kRowOfTile; }
DEVICE constexpr int storing_threads() { return kWarpgroup; }
#else
DEVICE constexpr int staged_rows(int rows) { return rows; }
DEVICE constexpr int storing_threads() { return 1; }
#endif
