// Packed MXFP4 weights in memory, see fp8moe_plugin/ops/mxfp4.py: chunks of 128 rows by 128 channels. A float32 scale
// for each chunk is the base of its exponents.
//
// A chunk has two slabs of 64 rows: of each the codes, 16 bytes for each thread of a warpgroup and 64 channels, then of
// each the exponents, for each row a byte for each 32 channels. Row g of a warp's 16 rows and row g + 8 belong to one
// thread: of w13 they are the gate and the up projection of a channel.
#pragma once
#include "device/fp4.cuh"
#include "pipeline/stages.cuh"

constexpr bool kScalesOfRows = false;  // see row_scales.cuh

constexpr int kChunkRows = 128, kSlabRows = 64;
constexpr int kThreadCodes = 16;  // bytes of a thread, for two of the four wgmmas of a chunk
constexpr int kSlabCodes = kSlabRows * 128 / 2, kSlabExponents = kSlabRows * 128 / 32;
constexpr int kChunkBytes = 2 * (kSlabCodes + kSlabExponents);

// Where the codes of thread `t` of the four that have row `g` of eight are among those of their warp. So also the words
// of the same thread of all rows, which decoders of many rows read at once, are in different banks.
DEVICE int slot_of(int g, int t) { return g * 4 + (t ^ g / 2 % 4); }

template <int kCount>
struct WeightScales : PerStage<kCount, 4> {};
template <int kCount>
struct WeightTables : Once<kCount, kFp4Tables * kFp4TableBytes, 8> {};

// Where a kernel finds its weights; in Python `Chunks`, in place of a tensor map.
struct alignas(64) WeightMap {
    const u8* chunks;
    int steps, further;  // chunks of a row block along K, and how many of them follow those of the K blocks
    int groups;          // 128 channels each of an expert's gate projection; only of w13
    u8 unused[sizeof(TensorMap) - 20];
};
static_assert(sizeof(WeightMap) == sizeof(TensorMap), "the launch has room for a tensor map");

constexpr bool kStoredPaired = true;       // the rows of the gate and up projections, 8 apart
DEVICE void prefetch(const WeightMap*) {}  // a bulk copy needs no descriptor
DEVICE void init_weights(u32 tables) { write_fp4_tables(tables); }

// The steps of a tile, each with a chunk and the scales of its rows.
DEVICE int weight_steps(const WeightMap& map, int) { return map.steps; }
// Whether all steps of a row block have the same base.
DEVICE bool have_one_base(const WeightMap& map) { return map.further == 0; }

// The scales of a block of 128 rows: one for each step, then the K block of each further step.
using WeightScale = float;
DEVICE int scale_pitch(const WeightMap& map, int) { return map.steps + map.further; }
DEVICE const WeightScale* scales_of_rows(const WeightScale* scales, i64 block, int pitch) {
    return scales + block * pitch;
}

// The chunks of 128 channels of the gate and up projections; `block` counts 128 rows, and is of the former.
struct GateAndUp {
    const u8* chunks;
    DEVICE GateAndUp(const WeightMap* map, int block) {
        const i64 before = block + block % map->groups;  // the block's chunks follow those of up's earlier rows
        chunks = map->chunks + before * map->steps * kChunkBytes;
    }
    // Starts to load chunk `first` of a step's two, or both.
    template <int kCount = 1>
    DEVICE void start(u32 to, u32 full, int step, int first) const {
        bulk_load(to, chunks + (i64(step) * 2 + first) * kChunkBytes, full, kCount * kChunkBytes);
    }
};

// The K blocks of a tile's steps. `scales`: those of its first rows.
struct StepsOfTile {
    const WeightScale* further;  // their K blocks
    int k_blocks;
    DEVICE StepsOfTile(const WeightScale* scales, const WeightMap& map, int k_blocks)
        : further(scales + map.steps), k_blocks(k_blocks) {}
    DEVICE int k_block(int step) const { return step < k_blocks ? step : int(__ldg(further + step - k_blocks)); }
};
