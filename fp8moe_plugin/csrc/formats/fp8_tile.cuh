// e4m3 weights: how a K block of a tile gets into a stage of shared memory, and what the main loops read there. The
// formats that include this add scales.
#pragma once
#include "device/ptx.cuh"
#include "pipeline/stages.cuh"

template <int kRows>
struct Weights : PerStage<kRows, kRowOfTile, kSwizzleBytes> {};

template <int kCount>
struct WeightTables : Once<kCount, 0, 1> {};  // to decode weights
DEVICE void init_weights(u32 /*tables*/) {}
constexpr bool kDecodedToRegisters = false;
constexpr bool kDecodedInStages = false;
constexpr bool kStoredPaired = false;  // TMA interleaves the rows of the gate and up projections as a kernel needs them

using WeightMap = TensorMap;

// A tile has a step for each K block, and scales have the pitch of one row of blocks.
DEVICE int weight_steps(const WeightMap&, int k_blocks) { return k_blocks; }
DEVICE int scale_pitch(const WeightMap&, int k_blocks) { return k_blocks; }
DEVICE bool have_one_base(const WeightMap&) { return false; }
struct StepsOfTile {
    DEVICE StepsOfTile(const float* /*scales*/, const WeightMap&, int /*k_blocks*/) {}
    DEVICE int k_block(int step) const { return step; }
};

// 128 channels of the gate and up projections; `block` counts 128 rows of the former. `map`: gate_up_map of
// fp8moe_plugin/launches/sm90/tensor_maps.py.
struct GateAndUp {
    const TensorMap* map;
    int block;
    DEVICE GateAndUp(const TensorMap* map, int block) : map(map), block(block) {}
};

// The weights in a stage. A load starts copies to row `to` of the tile, which complete on `full`.
template <class SharedMemory>
struct Fp8Tile {
    static constexpr u32 kBytes = SharedMemory::template kBytes<Weights>;  // without scales
    static constexpr int kChannels = 128;                                  // of a K block

    SharedMemory shared;
    int stage;
    DEVICE Fp8Tile(SharedMemory shared, int stage) : shared(shared), stage(stage) {}

    // The rows of a box of `map` from `row` on.
    DEVICE void load(int to, const TensorMap* map, u32 full, int k, int row) const {
        tma_load(shared.weights(stage, to), map, full, k * kChannels, row);
    }
    // The same for all blocks of the cluster whose bits are set in `blocks`.
    DEVICE void load_to_cluster(int to, const TensorMap* map, u32 full, int k, int row, u16 blocks) const {
        tma_load_to_cluster(shared.weights(stage, to), map, full, k * kChannels, row, blocks);
    }
    // The 256 rows of 128 channels of the gate and up projections, 8 rows of each in turn.
    DEVICE void load_gate_and_up(const GateAndUp& from, u32 full, int k) const {
        tma_load_4d(shared.weights(stage, 0), from.map, full, k * kChannels, 0, 0, from.block * (128 / 8));
    }
    // 64 rows of block `block` of 128 rows, by the order of interleaved_map there.
    DEVICE void load_interleaved(int to, const TensorMap* map, u32 full, int k, int block, int half) const {
        tma_load_4d(shared.weights(stage, to), map, full, k * kChannels, 0, half * 2, block * 4);
    }

    // The rows from `row` on as an operand of wgmma_issue: here their address. Swap-AB takes operands of any type for
    // which wgmma_issue has an overload, such as 64 rows that are loaded and decoded to registers.
    DEVICE u32 operand(int row) const { return shared.weights(stage, row); }
};
