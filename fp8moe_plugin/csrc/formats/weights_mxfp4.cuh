// Packed MXFP4 weights that stay packed in shared memory, and are decoded to e4m3 in registers, as the first operand of
// wgmma.
#pragma once
#include "device/wgmma.cuh"
#include "formats/mxfp4_chunks.cuh"

constexpr bool kDecodedToRegisters = true;

template <int kRows>
struct Weights : PerStage<kRows, kChunkBytes / kChunkRows, 128> {};

// The weights in a stage. Loads complete on `full`; a scale's copy completes with copy_async_arrive of the thread.
template <class SharedMemory>
struct WeightTile {
    static constexpr u32 kBytes = SharedMemory::template kBytes<Weights>;  // without scales

    SharedMemory shared;
    int stage;
    DEVICE WeightTile(SharedMemory shared, int stage) : shared(shared), stage(stage) {}

    // A step of the 128 rows from `row` on.
    DEVICE void load(int to, const WeightMap* map, u32 full, int step, int row) const {
        bulk_load(shared.weights(stage, to), map->chunks + (i64(row / kChunkRows) * map->steps + step) * kChunkBytes,
                  full, kChunkBytes);
    }
    // A step of 128 channels of the gate and up projections.
    DEVICE void load_gate_and_up(const GateAndUp& from, u32 full, int step) const {
        from.start<2>(shared.weights(stage, 0), full, step, 0);
    }
    DEVICE void load_scale(int i, const WeightScale* from) const { copy_async_4(shared.weight_scale(stage, i), from); }

    // The 64 rows from `row` on.
    DEVICE RegistersA operand(int row) const {
        const u32 chunk = shared.weights(stage, row / kChunkRows * kChunkRows), slab = row / kSlabRows % 2;
        const u32 thread = threadIdx.x % kWarpgroup, slot = slot_of(thread / 4, thread % 4);
        const u32 codes = chunk + slab * kSlabCodes + slot * kThreadCodes;
        const u32 exponents = chunk + 2 * kSlabCodes + slab * kSlabExponents + thread / 4 * 8;
        const uint2 of_rows = load_shared_8(exponents);
        const u32 tables = shared.template at<WeightTables>(0);
        RegistersA a;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = load_shared_16(codes + half * (kSlabCodes / 2));
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int step = half * 2 + i / 2, row = i % 2;
                const u32 entry = select_bytes(row ? of_rows.y : of_rows.x, 0, 0x4440 + step);
                const uint2 both = decode_fp4(words[i], load_shared_8(tables + entry));
                a.row[step][row] = both.x, a.row[step][2 + row] = both.y;
            }
        }
        return a;
    }
    DEVICE float scale(int i) const { return load_shared_float(shared.weight_scale(stage, i)); }
};
