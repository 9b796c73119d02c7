// Packed MXFP4 weights that are decoded to e4m3 in shared memory: a stage holds them as those of block FP8, and the
// main loops for many rows read the same. Chunks come to an area of their own, from which a warpgroup decodes them.
#pragma once
#include "device/decoding.cuh"
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

constexpr int kPairedRows = 32;  // of the gate projection, in turn with as many of up: in a stage, not in a chunk

// How a warpgroup decodes a chunk, to one half of a stage's 256 rows. kPaired: a chunk has 64 rows of the gate and 64
// of the up projection, and kPairedRows of each take turns in the stage. A thread decodes 32 codes with the same
// exponent at once, so that they share a table.
template <bool kPaired>
struct ChunkDecoder {
    static constexpr int kUnits = 4;  // of 32 codes
    static constexpr int kRowsOfPart = kPaired ? 8 : 16, kSecondRow = kPaired ? kPairedRows : 8;

    u32 chunk;
    uint2 entries;  // of both rows that the thread decodes, a byte for each 32 channels
    uint4 first;

    DEVICE static u32 row() { return threadIdx.x % 8; }  // of eight; the second ones are 8 further on in the chunk
    DEVICE static u32 second() { return threadIdx.x / 8 % 2; }
    DEVICE static u32 group() { return threadIdx.x / 16 % 2; }  // of 64 channels
    DEVICE static u32 warp() { return threadIdx.x % kWarpgroup / kWarp; }

    // The first row of the chunk's, as the stage has them, that the warp writes.
    DEVICE static u32 first_row() { return kPaired ? warp() / 2 * 2 * kPairedRows + warp() % 2 * 16 : warp() * 32; }
    // Unit: its 64 channels, then which 16 rows of the warp's 32.
    DEVICE uint4 codes(int unit) const {
        u32 from = chunk + warp() / 2 * kSlabCodes + warp() % 2 * 2 * kWarp * kThreadCodes;
        from += (group() * 2 + second()) * 4 + unit % 2 * (kSlabCodes / 2) + unit / 2 * kWarp * kThreadCodes;
        auto word = [&](int thread) { return load_shared(from + slot_of(row(), thread) * kThreadCodes); };
        return {word(0), word(1), word(2), word(3)};
    }
    // Reads what it needs first.
    DEVICE void read(u32 from) {
        chunk = from;
        from += 2 * kSlabCodes + warp() / 2 * kSlabExponents + (warp() % 2 * 2 * 8 + row()) * 8 + second() * 4;
        const u32 turn = group() ? 0x0321 : 0x3210;  // the first byte is the thread's
        entries = {select_bytes(load_shared(from), 0, turn), select_bytes(load_shared(from + 8 * 8), 0, turn)};
        first = codes(0);
    }
    // Writes to half `half` of the tile at address `rows`.
    DEVICE void write(u32 rows, int half, u32 tables) const {
        if (__ballot_sync(kAllLanes, !are_normal_fp4(entries)))
            write_units<true>(rows, half, tables);  // rare
        else
            write_units<false>(rows, half, tables);
    }

   private:
    template <bool kLoadTables>
    DEVICE void write_units(u32 rows, int half, u32 tables) const {
        const u32 row_of_warp = first_row() + row() + second() * kSecondRow;
        const u32 to = rows + half * kChunkRows * kRowOfTile +
                       (row_of_warp * kRowOfTile | (group() * 2 ^ row()) * 16);  // swizzled
        uint4 next = first;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const uint4 four = next;
            if (unit + 1 < kUnits) next = codes(unit + 1);  // in time for its turn
            const u32 entry = select_bytes(unit / 2 ? entries.y : entries.x, 0, 0x4440 + unit % 2 * 2);
            const uint2 table = kLoadTables ? load_shared_8(tables + entry) : normal_fp4_table(entry);
            const uint2 a = decode_fp4(four.x, table), b = decode_fp4(four.y, table), c = decode_fp4(four.z, table),
                        d = decode_fp4(four.w, table);
            const u32 offset = unit / 2 * kRowsOfPart * kRowOfTile;
            store_shared((to ^ unit % 2 * 64) + offset, make_uint4(a.x, b.x, c.x, d.x));
            store_shared((to ^ (unit % 2 * 64 + 16)) + offset, make_uint4(a.y, b.y, c.y, d.y));
        }
    }
};
