// The epilogue of gate_up.cu: a warpgroup activates, quantizes and stores 64 rows by kColumns channels, 128 or, in a
// short tile, half a group of the quantization; and its part of a tail.
#pragma once
#include "device/fp8.cuh"
#include "epilogue/activation.cuh"
#include "mma/row_tile.cuh"

struct QuantizedRows {
    const TensorMap* map;
    u8* q;
    float* scales;  // [N / 256, m] at scale_pitch(m)
    int channels, m;
    Activation activation;
};

template <int kCount>
struct Listed : Once<kCount, 4> {};  // see StoredTiles

// The tiles that a warpgroup has stored but not yet counted in the done counters, for which the second GEMM may wait.
// As counting takes a fence of all memory, tiles are counted in batches; the last tiles of a block one by one.
struct StoredTiles {
    static constexpr int kMost = 32;  // tiles listed at a time
    int* done_counters;               // see done_counters.cuh; null: nothing is counted
    int listed = 0;

    DEVICE static bool elected() { return threadIdx.x % kWarpgroup == 0; }
    template <class SharedMemory>
    DEVICE static u32 at(SharedMemory shared, int warpgroup, int i) {
        return shared.template at<Listed>(warpgroup * kMost + i);
    }
    template <class SharedMemory>
    DEVICE void add(SharedMemory shared, int warpgroup, const Tile& tile) {
        if (!done_counters) return;
        if (elected()) store_shared(at(shared, warpgroup, listed), u32(tile.row_tile));
        ++listed;
    }
    // Waits until all listed tiles are in memory. The warpgroup must meet at a barrier before it reports them.
    DEVICE static void wait() {
        if (elected()) tma_store_wait();
        fence_proxy_async_global();
    }
    template <class SharedMemory>
    DEVICE void report(SharedMemory shared, int warpgroup) {
        if (elected()) {
            __threadfence();
#pragma unroll 1
            for (int i = 0; i < listed; ++i) atomicAdd(done_counters + 1 + load_shared(at(shared, warpgroup, i)), 1);
        }
        listed = 0;
    }
    template <class SharedMemory>
    DEVICE void finish(SharedMemory shared, int warpgroup) {
        wait();
        warpgroup_barrier(warpgroup);
        if (!done_counters) return;
        report(shared, warpgroup);
        if (elected()) atomicAdd(done_counters, 1);
    }
};

// The largest magnitudes of the thread's two rows, from those of its own channels.
DEVICE void amax_of_rows(const u32 (&larger)[2], u32 (&amax)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        amax[r] = larger_of(larger[r]);
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) amax[r] = max(amax[r], __shfl_xor_sync(kAllLanes, amax[r], lanes));
    }
}

// Activates pairs of channels; `amax` gets the largest magnitudes of the rows.
template <int kColumns>
DEVICE void activate_rows(const Activation& activation, const Fragment<kColumns>& gate, const Fragment<kColumns>& up,
                          u32 (&value)[kColumns / 4], u32 (&amax)[2]) {
    u32 larger[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
        value[i] = activation.of_pair(gate, up, i);
        larger[i % 2] = max_u16x2(larger[i % 2], value[i] & kNoSigns);
    }
    amax_of_rows(larger, amax);
}

// Of a row or pair of tokens: two buffers, each with a part of each warpgroup.
template <class SharedMemory>
DEVICE u32 amax_at(SharedMemory shared, int buffer, int warpgroup, int i) {
    return shared.amax((buffer * kMathWarpgroups + warpgroup) * kWarpgroupM + i);
}

// Exchanges the largest magnitudes: in a short tile each warpgroup has half of every group. Two buffers take turns:
// before a buffer is written again, the barrier of the other one shows that both warpgroups have read it.
template <class SharedMemory>
DEVICE void exchange(SharedMemory shared, int warpgroup, int row, int& buffer, u32 (&amax)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (threadIdx.x % 4 == 0) store_shared(amax_at(shared, buffer, warpgroup, row + 8 * r), amax[r]);
    named_barrier(kMathBarrier, 128 * kMathWarpgroups);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        amax[r] = max(amax[r], load_shared(amax_at(shared, buffer, warpgroup ^ 1, row + 8 * r)));
    buffer ^= 1;
}

// kFirst: the first column in the staging area.
template <int kFirst = 0, int kPairs>
DEVICE void stage_quantized(u32 staging, int row, const float (&scale)[2], const u32 (&value)[kPairs]) {
    float inverse[2] = {__frcp_rn(scale[0]), __frcp_rn(scale[1])};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        int r = i % 2, column = kFirst + i / 2 * 8 + threadIdx.x % 4 * 2;
        u32 to =
            staging + (row + 8 * r) * 128 + (column / 16 ^ row % 8) * 16 + column % 16;  // row + 8 has the same swizzle
        store_shared(to, quantize_two(value[i], scale[r], inverse[r]));
    }
}

// `first`: as kFirst.
DEVICE void copy_quantized(u32 staging, const QuantizedRows& out, int row, int rows, int column, int columns,
                           int first = 0) {
    int chunks = columns / 16;
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < rows * chunks; i += 128) {
        int r = i / chunks, chunk = i % chunks;
        *reinterpret_cast<uint4*>(out.q + i64(row + r) * out.channels + column + chunk * 16) =
            load_shared_16(staging + r * 128 + (first / 16 + chunk ^ r % 8) * 16);
    }
}

// Of the thread's two rows, the first of which is number `first` of `rows`; by one lane of each row.
DEVICE void store_scales(const QuantizedRows& out, const Tile& tile, int row, int rows, int first,
                         const float (&scale)[2]) {
    float* scales = out.scales + i64(tile.column) * scale_pitch(out.m) + row + first;
    if (first < rows) scales[0] = scale[0];
    if (first + 8 < rows) scales[8] = scale[1];
}

// Waits until the staging buffer is free, and lists the tile that it gets.
template <class SharedMemory>
DEVICE void begin_storing(SharedMemory shared, const Tile& tile, int warpgroup, StoredTiles& stored) {
    bool report = stored.done_counters && (tile.last || stored.listed == stored.kMost);
    if (report)
        stored.wait();
    else if (stored.elected())
        tma_store_wait_read();
    warpgroup_barrier(warpgroup);
    if (report) stored.report(shared, warpgroup);
    stored.add(shared, warpgroup, tile);
}

template <int kColumns, class SharedMemory>
DEVICE void store_quantized(SharedMemory shared, const QuantizedRows& out, const Tile& tile, int warpgroup,
                            int row_block, int& buffer, StoredTiles& stored, const Fragment<kColumns>& gate,
                            const Fragment<kColumns>& up) {
    constexpr bool kShort = kColumns < kHalfN;
    bool elected = threadIdx.x % 128 == 0;
    int first = warp_row(threadIdx.x) + lane_row(threadIdx.x);  // the thread's first row, in the block of rows
    int row = tile.row + row_block * kWarpgroupM, rows = min(kWarpgroupM, tile.rows - row_block * kWarpgroupM);
    u32 value[kColumns / 4], amax[2], staging = shared.staging(warpgroup * kWarpgroupM);
    activate_rows<kColumns>(out.activation, gate, up, value, amax);
    if (kShort) exchange(shared, warpgroup, first, buffer, amax);
    float scale[2] = {group_scale(amax[0]), group_scale(amax[1])};
    if (threadIdx.x % 4 == 0 && !(kShort && warpgroup == 1)) store_scales(out, tile, row, rows, first, scale);
    begin_storing(shared, tile, warpgroup, stored);
    stage_quantized(staging, first, scale, value);
    fence_proxy_async();
    warpgroup_barrier(warpgroup);  // the staging buffer is full
    int column = tile.column * kHalfN + (kShort ? warpgroup * kColumns : 0);
    if (kShort || rows < kWarpgroupM) {
        copy_quantized(staging, out, row, rows, column, kColumns);
    } else if (elected) {
        tma_store(out.map, staging, column, row);
        tma_store_commit();
    }
}

// ---- the tail: a transposed (swap-AB) result, whose rows are channels and whose columns are tokens ------------------

// Quantizes a pair of tokens to shared memory.
DEVICE void stage_pair(u32 pair, const float (&scale)[2], const float (&inverse)[2], u32 to_first, u32 to_second) {
    u16 codes = quantize_two(pair, scale, inverse);
    store_shared(to_first, u8(codes));
    store_shared(to_second, u8(codes >> 8));
}

// The largest magnitude of each token of a pair, of kCount of the thread's channels, over the channels of its warp.
template <int kCount>
DEVICE u32 warp_amax(const u32 (&pairs)[kCount]) {
    u32 amax = pairs[0] & kNoSigns;
#pragma unroll
    for (int i = 1; i < kCount; ++i) amax = max_u16x2(amax, pairs[i] & kNoSigns);
#pragma unroll
    for (int lanes = 4; lanes < kWarp; lanes *= 2) amax = max_u16x2(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
    return amax;
}

// The same over all warps, from shared memory; amax_at(warp) is the address of a warp's.
template <int kWarps, class AmaxAt>
DEVICE u32 block_amax(AmaxAt amax_at) {
    u32 amax = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) amax = max_u16x2(amax, load_shared(amax_at(warp)));
    return amax;
}

// The tail: 16 tokens by 64 channels per warpgroup, so that both share every group. Values are pairs of tokens.
template <class SharedMemory>
DEVICE void store_quantized_tail(SharedMemory shared, const QuantizedRows& out, const Tile& tile, int warpgroup,
                                 int& buffer, const Tail& gate, const Tail& up) {
    constexpr int kBlocks = kTailRows / 8;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = tile.row + kBlockM, rows = tile.rows - kBlockM;
    auto amax_of = [&](int from, int block) {
        return amax_at(shared, buffer, 0, (from * kBlocks + block) * 4 + lane % 4);
    };
    u32 value[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kTailRows / 4; ++i) value[i / 2][i % 2] = out.activation.of_pair(gate, up, i);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        u32 amax = warp_amax(value[block]);
        if (lane < 4) store_shared(amax_of(warp, block), amax);
    }
    named_barrier(kMathBarrier, 128 * kMathWarpgroups);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        u32 amax = block_amax<kMathWarps>([=](int from) { return amax_of(from, block); });
        float scale[2] = {group_scale(amax << 16), group_scale(amax & 0xFFFF0000)};
        float inverse[2] = {__frcp_rn(scale[0]), __frcp_rn(scale[1])};
        int token = block * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 to = shared.staging(kBlockM + token) + warp * 16 + lane / 4 + i * 8;
            stage_pair(value[block][i], scale, inverse, to, to + 128);
        }
        float* scales = out.scales + i64(tile.column) * scale_pitch(out.m) + row + token;
        if (warp == 0 && lane < 4 && token < rows) scales[0] = scale[0];
        if (warp == 0 && lane < 4 && token + 1 < rows) scales[1] = scale[1];
    }
    buffer ^= 1;
    warpgroup_barrier(warpgroup);
    int token = threadIdx.x % 128 / 4, chunk = warpgroup * 4 + threadIdx.x % 4;
    if (token < rows)
        *reinterpret_cast<uint4*>(out.q + i64(row + token) * out.channels + tile.column * kHalfN + chunk * 16) =
            load_shared_16(shared.staging(kBlockM + token) + chunk * 16);
}
