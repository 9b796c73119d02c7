// grouped_gemm.cu and gate_up.cu: their variants, the shape of a tile, the roles of the warps and the layout of shared
// memory.
#pragma once
#include "device/ptx.cuh"
#include "pipeline/tile_queue.cuh"

#define OUTPUT_BF16 0         // of grouped_gemm.cu: staged in shared memory, stored by TMA
#define OUTPUT_BF16_DIRECT 1  // stored from registers, with an optional addend C
#define OUTPUT_F32_DIRECT 2
#ifndef SWIGLU
#define SWIGLU 0  // 1 in gate_up.cu: activated and quantized; staged, stored by TMA
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef KEEP_B
#define KEEP_B 0
#endif

constexpr int kStages = STAGES;
constexpr int kBlockM = 128, kBlockK = 128;
static_assert(kBlockM == RowTiles::kBlockMOfTails, "these tiles have tails");
constexpr int kHalfN = 128, kHalves = BLOCK_N / kHalfN;
constexpr bool kSwiglu = SWIGLU;
constexpr int kTileN = kSwiglu ? kHalfN : BLOCK_N;  // from a tile's columns to the next one's
using Queue = TileQueue<kBlockM, KEEP_B ? 4 : 1>;
constexpr int kMathWarpgroups = 2, kWarpgroupM = kBlockM / kMathWarpgroups;
constexpr int kThreads = 128 * (kMathWarpgroups + 1);
static_assert(kThreads == THREADS, "plan.py has the same roles");
constexpr int kFullArrivals = GATHER ? 129 : 2;  // of a stage: who announces the bytes of TMA, and every copying thread
constexpr int kMathBarrier = 1 + kMathWarpgroups, kProducerBarrier = kMathBarrier + 1;
// Where K is at most this many times 128, rows of A are loaded in boxes of 16, which is faster there:
// docs/experiments/008-staging-and-boxes.md.
constexpr int kNarrowBoxes = 2;
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // together the 168 a thread of the launch
constexpr int kListed = 32;                                   // row tiles whose completion a warpgroup keeps back
constexpr int kStoreN = kSwiglu ? 128 : 64;                   // columns of a TMA store: 128 bytes, one swizzle row
constexpr int kStoreParts = kHalfN / kStoreN, kStagedHalves = kSwiglu ? 1 : kHalves;

// Where everything is in shared memory; tiles are at multiples of 1024 bytes, which their swizzle needs.
struct SharedMemory {
    static constexpr u32 kBytesA = (kBlockM + kTailRows) * kBlockK, kBytesB = kHalfN * kBlockK;
    static constexpr u32 kBytesStore = kWarpgroupM * 128, kBytesTail = kTailRows * 128;
    static constexpr u32 kB = kStages * kBytesA;
    static constexpr u32 kStaging = kB + kStages * kHalves * kBytesB;
    static constexpr u32 kTailStaging = kStaging + kMathWarpgroups * kStagedHalves * kStoreParts * kBytesStore;
    static constexpr u32 kScalesA = kTailStaging + (kSwiglu ? 1 : kMathWarpgroups * kHalves) * kBytesTail;
    static constexpr u32 kBytesScalesA = (kBlockM + kTailRows + ActivationScales::kSlack) * 4;
    static constexpr u32 kScalesB = kScalesA + kStages * kBytesScalesA;
    static constexpr u32 kTiles = (kScalesB + kStages * kHalves * 4 + 15) / 16 * 16;
    static constexpr u32 kFull = kTiles + kStages * 16, kEmpty = kFull + kStages * 8;
    static constexpr u32 kAmax = kEmpty + kStages * 8;
    static constexpr u32 kGatheredTile = kAmax + (kSwiglu ? 2 * kMathWarpgroups * kWarpgroupM * 4 : 0);
    static constexpr u32 kComplete = kGatheredTile + (GATHER ? 16 : 0);
    static constexpr u32 kEnd = kComplete + (kSwiglu ? kMathWarpgroups * kListed * 4 : 0);

    u32 base;
    DEVICE u32 a(int stage, int row) const { return base + stage * kBytesA + row * kBlockK; }
    DEVICE u32 b(int stage, int half) const { return base + kB + (stage * kHalves + half) * kBytesB; }
    DEVICE u32 staging(int warpgroup, int half, int part) const {
        return base + kStaging + ((warpgroup * kStagedHalves + half) * kStoreParts + part) * kBytesStore;
    }
    DEVICE u32 tail_staging(int warpgroup, int half) const {
        return base + kTailStaging + (warpgroup * kHalves + half) * kBytesTail;
    }
    DEVICE u32 a_scale(int stage, int row) const { return base + kScalesA + stage * kBytesScalesA + row * 4; }
    DEVICE u32 b_scale(int stage, int half) const { return base + kScalesB + (stage * kHalves + half) * 4; }
    DEVICE u32 tile(int stage) const { return base + kTiles + stage * 16; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival a math warp
    DEVICE u32 amax(int buffer, int warpgroup, int row) const {
        return base + kAmax + ((buffer * kMathWarpgroups + warpgroup) * kWarpgroupM + row) * 4;
    }
    DEVICE u32 gathered_tile() const { return base + kGatheredTile; }
    DEVICE u32 complete(int warpgroup, int i) const { return base + kComplete + (warpgroup * kListed + i) * 4; }
};
static_assert(SharedMemory::kEnd <= SMEM_BYTES && SMEM_BYTES - SharedMemory::kEnd < 1024, "as in plan.py");

// The stages of a step. B's are A's; but with KEEP_B a tile of the same B as the tile before finds it where that one
// did. What is loaded later still replaces what was last read at least kStages steps before, as long as K is at most
// kStages steps: the barriers of A's stages guard both.
struct Rings {
    Ring<kStages> a, b;
    int expert = -1, column = 0;  // of the tile before

    // To be called for each tile by those who load it and those who multiply it; whether its B is there already.
    DEVICE bool keep_b(const Tile& tile, int k_blocks) {
        if (!KEEP_B) return false;
        bool kept = tile.expert == expert && tile.column == column;
        if (kept) b.go_back(k_blocks);
        expert = tile.expert, column = tile.column;
        return kept;
    }
};

struct Operands {
    const TensorMap *a, *a_narrow, *b;  // of A in boxes of 64 rows, and of kTailRows
    const uint4* gathered;
    const int* a_rows;
    ActivationScales a_scales;
    const float* b_scales;  // [experts, ceil(N / 128), K / 128]
    int* ready;             // see rows_done.cuh; the GEMM before tells by warpgroups. null: that GEMM has ended
    int n, k_blocks;
};
