// Split K through global memory: thread blocks share a tile, with a part of K each, and store their sums. The last one
// to arrive adds them up in the order of the splits, so that the result does not depend on which block that is.
#pragma once
#include "device/fragment.cuh"
#include "device/ptx.cuh"
#include "pipeline/tile.cuh"

constexpr int kMaxSplits = MAX_GATE_UP_SPLITS;

// With `count` splits, a group of 128 channels has as many columns of tiles, one per part of K.
struct Splits {
    int count;
    DEVICE int group_of(const Tile& tile) const { return count == 1 ? tile.column : tile.column / count; }
    DEVICE int split_of(const Tile& tile) const { return count == 1 ? 0 : tile.column % count; }
};

// True in the last of `splits` blocks to call this for a counter that starts at zero; what the others wrote before is
// then visible past L1. By `threads` threads, from a multiple of `threads` on, which meet at a barrier; `flag` is 4
// bytes of shared memory for their use.
DEVICE bool comes_last(u32 flag, int* arrived, int splits, int barrier, int threads) {
    named_barrier(barrier, threads);
    if (threadIdx.x % threads == 0) store_shared(flag, u32(count_acquired(arrived) == splits - 1));
    named_barrier(barrier, threads);
    return load_shared(flag);
}

// Adds up the splits of a tile; false in a block that is not the last. The 256 sums of a token are contiguous, 16 bytes
// per thread: a pair of rows for each of two slabs. `flag`: see comes_last.
template <int kTokens, int kMathThreads, class Result>
DEVICE bool add_splits(u32 flag, const Result& out, const Tile& tile, int barrier, Fragment<kTokens> (&sum)[2]) {
    constexpr int kBlockI = 128;
    int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = out.splits.group_of(tile);
    float4* all =
        reinterpret_cast<float4*>(out.partial) +
        (i64(tile.row) * (out.intermediate / kBlockI) + i64(group) * tile.rows) * out.splits.count * (2 * kBlockI / 4);
    auto at = [&](int split, int token) {
        return all + (split * tile.rows + token) * (2 * kBlockI / 4) + warp * 8 + lane / 4;
    };
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
        int token = fragment_column(threadIdx.x) + column_offset(i), e = element_at(0, i);
        if (token < tile.rows)
            *at(out.splits.split_of(tile), token) = make_float4(sum[0][e], sum[0][e + 2], sum[1][e], sum[1][e + 2]);
    }
    int* arrived = out.done.of_tile(tile) + 1 + group;
    if (!comes_last(flag, arrived, out.splits.count, barrier, kMathThreads)) return false;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
        int token = fragment_column(threadIdx.x) + column_offset(i), e = element_at(0, i);
        if (token >= tile.rows) continue;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        auto add = [&](float4 part) { total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w; };
        if (kTokens == 8) {
            float4 part[kMaxSplits];
#pragma unroll
            for (int split = 0; split < kMaxSplits; ++split)  // all in flight at once
                if (split < out.splits.count) part[split] = __ldcg(at(split, token));
#pragma unroll
            for (int split = 0; split < kMaxSplits; ++split)
                if (split < out.splits.count) add(part[split]);
        } else {  // wider tiles have no registers for that
#pragma unroll 1
            for (int split = 0; split < out.splits.count; ++split) add(__ldcg(at(split, token)));
        }
        sum[0][e] = total.x, sum[0][e + 2] = total.y, sum[1][e] = total.z, sum[1][e + 2] = total.w;
    }
    named_barrier(barrier, kMathThreads);  // not needed, but tells the compiler that warps are not diverged
    return true;
}
// With one slab per warpgroup, K is not split.
template <int kTokens, int kMathThreads, class Result>
DEVICE bool add_splits(u32, const Result&, const Tile&, int, Fragment<kTokens> (&)[1]) {
    return true;
}
