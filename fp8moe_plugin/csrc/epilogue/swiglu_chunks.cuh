// The epilogue of gate_up.cu for decoded weights, from the parts of swiglu_rows.cuh. A chunk has 64 channels, half of a
// group of the quantization. The other half is a warpgroup's, too, or the other warpgroup's, or the other block's.
#pragma once
#include "epilogue/swiglu_rows.cuh"
#include "mma/decoded_row_tile.cuh"

constexpr int kChunkChannels = kHalfN / 2, kExchanges = 2 * kMathWarpgroups;  // buffers of each warpgroup
constexpr int kSenders = kWarpgroup / 4;                                      // threads, which have two rows

// What the same warpgroup of the other block has sent: of each sender the largest magnitudes of its two rows, in up to
// two blocks of tokens.
template <int kCount>
struct OtherAmax : Once<kCount, 8, 8> {};
template <int kCount>
struct AmaxThere : Once<kCount, 8, 8> {};  // its bytes

// By one thread, before the blocks meet.
template <class SharedMemory>
DEVICE void init_exchange(SharedMemory shared) {
    for (int i = 0; i < kExchanges; ++i) barrier_init(shared.template at<AmaxThere>(i), 1);
}

struct Exchange {
    int buffer = 0;  // of the exchange within the block
    u32 count = 0;   // of those with the other block

    // Two buffers take turns: the other block sends to one again only when it has what was sent after it was read. Each
    // block awaits all that is sent to it, so it does not end before.
    template <int kBlocks, class SharedMemory>
    DEVICE void with_other_block(SharedMemory shared, int warpgroup, u32 (&amax)[kBlocks][2]) {
        const int i = count % 2 * kMathWarpgroups + warpgroup, other = rank_of_block() ^ 1;
        const u32 there = shared.template at<AmaxThere>(i);
        const u32 at = shared.template at<OtherAmax>(i * kSenders + threadIdx.x % kWarpgroup / 4);
        if (threadIdx.x % kWarpgroup == 0) barrier_arrive_expect(there, kSenders * 8);
        const u32 own[2] = {pair(amax[0]), kBlocks == 2 ? pair(amax[kBlocks - 1]) : 0};
        if (threadIdx.x % 4 == 0)
            store_async(in_block(at, other), make_float2(__uint_as_float(own[0]), __uint_as_float(own[1])),
                        in_block(there, other));
        barrier_wait(there, count / 2 % 2);
        const uint2 sent = load_shared_8(at);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const u32 larger = max_u16x2(own[block], block == 0 ? sent.x : sent.y);
            amax[block][0] = larger << 16, amax[block][1] = larger & 0xFFFF0000;
        }
        ++count;
    }

   private:
    // They are bfloat16.
    DEVICE static u32 pair(const u32 (&amax)[2]) { return amax[0] >> 16 | amax[1]; }
};

// Activates the channels of a chunk or of half of one, to values from `first` on.
template <int kElements, int kValues>
DEVICE void activate_chunk(const Activation& activation, const float (&sum)[kElements], int first,
                           u32 (&value)[kValues], u32 (&larger)[2]) {
    constexpr int kTurn = kPairedRows / 2;  // elements
#pragma unroll
    for (int i = 0; i < kElements / 4; ++i) {
        const int gate = 2 * i / kTurn * 2 * kTurn + 2 * i % kTurn, up = gate + kTurn;
        const u32 activated = activation(make_float2(sum[gate], sum[gate + 1]), make_float2(sum[up], sum[up + 1]));
        value[first + i] = activated;
        larger[i % 2] = max_u16x2(larger[i % 2], activated & kNoSigns);
    }
}

// Block 1 of the part is staged next to block 0.
template <class Part, class SharedMemory>
DEVICE void store_part(SharedMemory shared, const QuantizedRows& out, const Tile& tile, const Part& part, int warpgroup,
                       Exchange& exchanges, StoredTiles& stored, const typename Part::Sums& sum,
                       const typename Part::HalfSums& half) {
    constexpr int kBlocks = Part::kBlocks + Part::kHasHalf, kColumns = Part::kChunks * kChunkChannels;
    constexpr int kSecondColumns = Part::kHasHalf ? kChunkChannels / 2 : kChunkChannels;
    const int first = warp_row(threadIdx.x) + lane_row(threadIdx.x);
    u32 value[kColumns / 4], second[kSecondColumns / 4], amax[kBlocks][2], larger[2][2] = {};
#pragma unroll
    for (int j = 0; j < Part::kChunks; ++j)
        activate_chunk(out.activation, sum[0][j], j * kChunkChannels / 4, value, larger[0]);
    amax_of_rows(larger[0], amax[0]);
    if constexpr (kBlocks == 2) {
        if constexpr (Part::kHasHalf)
            activate_chunk(out.activation, half[0], 0, second, larger[1]);
        else
            activate_chunk(out.activation, sum[1][0], 0, second, larger[1]);
        amax_of_rows(larger[1], amax[1]);
        if (Part::kHasHalf) exchange(shared, warpgroup, first, exchanges.buffer, amax[1]);
    }
    if (part.split)
        exchanges.with_other_block(shared, warpgroup, amax);
    else if (Part::kChunks == 1)
        exchange(shared, warpgroup, first, exchanges.buffer, amax[0]);

    const u32 staging = shared.staging(warpgroup * kWarpgroupM);
    const bool stores_scales = part.split ? rank_of_block() == 0 : Part::kChunks == 2 || warpgroup == 0;
    float scale[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        scale[i][0] = group_scale(amax[i][0]), scale[i][1] = group_scale(amax[i][1]);
        const bool halved = Part::kHasHalf && i == 1;
        if (threadIdx.x % 4 == 0 && stores_scales && !(halved && warpgroup == 1))
            store_scales(out, tile, tile.row + part.token(i), part.rows(tile, i), first, scale[i]);
    }
    begin_storing(shared, tile, warpgroup, stored);
    stage_quantized(staging, first, scale[0], value);
    if constexpr (kBlocks == 2) stage_quantized<kChunkChannels>(staging, first, scale[1], second);
    fence_proxy_async();
    warpgroup_barrier(warpgroup);  // the staging buffer is full
    const int column = tile.column * kHalfN + part.chunk * kChunkChannels;
    const int row = tile.row + part.token(0), rows = part.rows(tile, 0);
    if (Part::kChunks == 1 || rows < kWarpgroupM) {
        copy_quantized(staging, out, row, rows, column, kColumns);
    } else if (stored.elected()) {
        tma_store(out.map, staging, column, row);
        tma_store_commit();
    }
    if constexpr (kBlocks == 2)
        copy_quantized(staging, out, tile.row + part.token(1), part.rows(tile, 1),
                       column + (Part::kHasHalf ? warpgroup * kSecondColumns : 0), kSecondColumns, kChunkChannels);
}
