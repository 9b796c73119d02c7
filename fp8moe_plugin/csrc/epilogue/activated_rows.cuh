// How gate_up_few_rows finishes a tile: its math warps activate their sums and stage them as bfloat16, and begin with
// the next tile. Meanwhile a warp quantizes the rows, stores them, and counts the tile.
#pragma once
#include "device/fragment.cuh"
#include "epilogue/swiglu_token.cuh"
#include "pipeline/done_counters.cuh"
#include "pipeline/producer.cuh"
#include "pipeline/stages.cuh"

constexpr int kGroup = 128;  // channels of a tile

// A token's channels; with the further bytes, the tokens that a warp stores at once are in different banks.
template <int kTokens>
struct Activated : Once<kTokens, kGroup * 2 + 8, 8> {};
template <int kCount>
struct ActivatedTile : Once<kCount, 16, 16> {};
template <int kCount>
struct AllActivated : Once<kCount, 8, 8> {};  // an arrival of each math warp
template <int kCount>
struct AllFinished : Once<kCount, 8, 8> {};

// Before init_barriers.
template <class SharedMemory>
DEVICE void init_activated(SharedMemory shared, int math_warps) {
    if (threadIdx.x > 0) return;
    barrier_init(shared.template at<AllActivated>(0), math_warps);
    barrier_init(shared.template at<AllFinished>(0), 1);
}

// The thread's channel of a slab, in a tile's group of channels: its two rows are the gate and the up projection of it.
template <int kSlabs>
DEVICE u32 channel_of_slab(int slab) {
    return (threadIdx.x / kWarpgroup * kSlabs + slab) * 32 + threadIdx.x % kWarpgroup / 4;
}

// ---- math warps ----------------------------------------------------------------------------------------------------

struct ActivatedRows {
    u32 phase = 1;

    // Waits until the tile before is finished. All math warps call stage for each tile, then end.
    template <int kTokens, int kSlabs, class SharedMemory>
    DEVICE void stage(SharedMemory shared, const Activation& activation, const Tile& tile,
                      const Fragment<kTokens> (&sum)[kSlabs]) {
        wait_by_warp(shared.template at<AllFinished>(0), phase);
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i)
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab) {
                const u32 pair = activation.of_pair(sum[slab], i), at = channel_of_slab<kSlabs>(slab) * 2;
                const int token = i * 8 + fragment_column(threadIdx.x);
                store_shared(shared.template at<Activated>(token) + at, u16(pair));
                store_shared(shared.template at<Activated>(token + 1) + at, u16(pair >> 16));
            }
        hand_over(shared, tile);
    }
    template <class SharedMemory>
    DEVICE void end(SharedMemory shared) {
        wait_by_warp(shared.template at<AllFinished>(0), phase);
        hand_over(shared, Tile{});
    }

   private:
    template <class SharedMemory>
    DEVICE void hand_over(SharedMemory shared, const Tile& tile) {
        if (threadIdx.x == 0) publish_tile(shared.template at<ActivatedTile>(0), tile);
        __syncwarp();
        if (lane_of_warp() == 0) barrier_arrive(shared.template at<AllActivated>(0));
        phase ^= 1;
    }
};

// ---- the warp that finishes tiles ----------------------------------------------------------------------------------

// Four rows at once, 16 channels in a lane. `out` is the kernel's Result.
template <class SharedMemory, class Result>
DEVICE void finish_rows(SharedMemory shared, const Result& out, const Tile& tile) {
    constexpr int kRows = 4, kLanes = kWarp / kRows, kFours = kGroup / 4 / kLanes;
    const int lane = lane_of_warp() % kLanes, group = out.splits.group_of(tile);
    u8* q = out.q + i64(tile.row) * out.intermediate + group * kGroup + lane * 4 * kFours;
    float* scales = out.scales + i64(group) * scale_pitch(out.m) + tile.row;
#pragma unroll 1
    for (int row = lane_of_warp() / kLanes, end = (tile.rows + kRows - 1) / kRows * kRows; row < end; row += kRows) {
        uint2 values[kFours];
        u32 pair = 0;
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            values[i] = load_shared_8(shared.template at<Activated>(row) + (lane * kFours + i) * 8);
            pair = max_u16x2(pair, max_u16x2(values[i].x & kNoSigns, values[i].y & kNoSigns));
        }
        u32 amax = larger_of(pair);
#pragma unroll
        for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
        const float scale = group_scale(amax), inverse = __frcp_rn(scale);
        auto codes = [&](int i) { return four_codes(values[i], scale, inverse); };
        const uint4 all = make_uint4(codes(0), codes(1), codes(2), codes(3));
        if (row < tile.rows) {
            *reinterpret_cast<uint4*>(q + i64(row) * out.intermediate) = all;
            if (lane == 0) scales[row] = scale;
        }
    }
}

template <class SharedMemory, class Result>
DEVICE void finish_tiles(SharedMemory shared, const Result& out) {
    const int lane = lane_of_warp();
    for (u32 phase = 0;; phase ^= 1) {
        wait_by_warp(shared.template at<AllActivated>(0), phase);
        const Tile tile = published_tile(shared.template at<ActivatedTile>(0));
        if (tile.rows == 0) break;
        finish_rows(shared, out, tile);
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(shared.template at<AllFinished>(0));
            if (out.done.counters) count_released(out.done.of_tile(tile));
        }
    }
    if (lane == 0) out.done.count_block();
}
