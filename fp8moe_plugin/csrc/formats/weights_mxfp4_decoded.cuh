// Packed MXFP4 weights that are decoded to e4m3 in shared memory: a stage holds them as those of block FP8, and the
// main loops for many rows read the same. Chunks come to an area of their own, from which a warpgroup decodes them.
//
// The codes of a thread are those that it would multiply in the kernels for few rows: of two rows 8 apart four channels
// and four 16 channels further on, for each 32 channels. So a warp writes 4 bytes of 8 rows each, and the swizzle
// spreads them over all banks.
#pragma once
#include "formats/mxfp4_chunks.cuh"

constexpr bool kDecodedToRegisters = false;
constexpr bool kDecodedInStages = true;

template <int kRows>
struct Weights : PerStage<kRows, kRowOfTile, kSwizzleBytes> {};

// The decoded weights in a stage.
template <class SharedMemory>
struct WeightTile {
    SharedMemory shared;
    int stage;
    DEVICE WeightTile(SharedMemory shared, int stage) : shared(shared), stage(stage) {}

    // A copy that completes with copy_async_arrive of the thread.
    DEVICE void load_scale(int i, const WeightScale* from) const { copy_async_4(shared.weight_scale(stage, i), from); }
    // A scale of 0, for a step without weights.
    DEVICE void no_scale(int i) const { store_shared(shared.weight_scale(stage, i), 0u); }
    DEVICE u32 operand(int row) const { return shared.weights(stage, row); }
    DEVICE float scale_of_half(int half) const { return load_shared_float(shared.weight_scale(stage, half)); }
};

// How a warpgroup decodes two chunks, of 256 rows. kPaired: of the gate and the up projection, which become 128 rows
// each.
template <bool kPaired>
struct ChunkDecoder {
    static constexpr int kSlabs = 4, kLoads = 2 * kSlabs;  // a load: 16 bytes of a thread, of 64 channels
    static constexpr int kWarpRows = kPaired ? 8 : 16, kSecondRow = kPaired ? 128 : 8;
    static constexpr int kSlabRowsInTile = kPaired ? 32 : 64;  // slabs follow each other

    u32 chunk[2], tables;
    uint2 entries[kSlabs];  // of both rows, a byte for each 32 channels
    uint4 first;

    DEVICE u32 codes(int load) const {
        const u32 thread = threadIdx.x % kWarpgroup;
        return chunk[load / 4] + load / 2 % 2 * kSlabCodes + load % 2 * (kSlabCodes / 2) + thread * kThreadCodes;
    }
    // Reads what does not depend on the stage.
    DEVICE ChunkDecoder(const u32 (&chunk)[2], u32 tables) : chunk{chunk[0], chunk[1]}, tables(tables) {
        const u32 thread = threadIdx.x % kWarpgroup;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab)
            entries[slab] =
                load_shared_8(chunk[slab / 2] + 2 * kSlabCodes + slab % 2 * kSlabExponents + thread / 4 * 8);
        first = load_shared_16(codes(0));
    }
    // Writes the 256 rows from address `rows` on. Calls decoded(i) when the thread has decoded its part of chunk i.
    template <class Decoded>
    DEVICE void write(u32 rows, Decoded decoded) const {
        if (__ballot_sync(kAllLanes, !are_normal_fp4(entries)))
            write_slabs<true>(rows, decoded);  // rare
        else
            write_slabs<false>(rows, decoded);
    }

   private:
    template <bool kLoadTables, class Decoded>
    DEVICE void write_slabs(u32 rows, Decoded decoded) const {
        const u32 warp = threadIdx.x % kWarpgroup / kWarp, lane = lane_of_warp(), row = lane_row(lane);
        const u32 to = (rows + (warp * kWarpRows + row) * kRowOfTile + lane % 4 * 4) | row * 16;  // swizzled
        uint4 next = first;
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            const uint4 four = next;
            if (load + 1 < kLoads) next = load_shared_16(codes(load + 1));  // in time for its turn
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int slab = load / 2, step = load % 2 * 2 + i / 2, second = i % 2;
                const u32 entry = select_bytes(second ? entries[slab].y : entries[slab].x, 0, 0x4440 + step);
                const uint2 both =
                    decode_fp4(words[i], kLoadTables ? load_shared_8(tables + entry) : normal_fp4_table(entry));
                const u32 offset = (slab * kSlabRowsInTile + second * kSecondRow) * kRowOfTile;
                store_shared((to ^ step * 32) + offset, both.x);
                store_shared((to ^ (step * 32 + 16)) + offset, both.y);
            }
            if (load % 4 == 3) decoded(load / 4);
        }
    }
};
