// The chunks of grouped_gemm.cu. The halves of a column are two blocks of rows, with further steps of their own. So
// each of these has a step of the tile for each half, in which the scale of the other half is 0.
#pragma once
#include "pipeline/row_tile.cuh"

constexpr int kHalvesOfColumn = 2;
DEVICE int steps_of_tile(const WeightMap& map) { return map.steps + map.further; }
DEVICE int step_of_chunk(int step, int k_blocks) { return step < k_blocks ? step : k_blocks + (step - k_blocks) / 2; }

struct HalfChunks {
    const u8* chunks;
    int to_next, k_blocks;  // bytes; 0 where a tile passes N

    DEVICE HalfChunks(const Operands& in, const Tile& tile) : k_blocks(in.k_blocks) {
        const int blocks = in.n / kHalfN, block = tile.column * kHalvesOfColumn;  // of rows
        const int pitch = in.weights->steps * kChunkBytes;
        chunks = in.weights->chunks + (tile.expert * blocks + block) * i64(pitch);
        to_next = block + 1 < blocks ? pitch : 0;
    }
    DEVICE void start(u32 to, u32 full, int step, int half) const {
        bulk_load(to, chunks + half * to_next + i64(step_of_chunk(step, k_blocks)) * kChunkBytes, full, kChunkBytes);
    }
};

struct HalfScales {
    const WeightMap& map;
    const WeightScale* scales;
    int to_next, k_blocks;

    DEVICE HalfScales(const Operands& in, const Tile& tile) : map(*in.weights), k_blocks(in.k_blocks) {
        const int blocks = in.n / kHalfN, block = tile.column * kHalvesOfColumn, pitch = scale_pitch(map, k_blocks);
        scales = scales_of_rows(in.weight_scales, tile.expert * blocks + block, pitch);
        to_next = block + 1 < blocks ? pitch : 0;
    }
    DEVICE bool is_second(int step) const { return step >= k_blocks && (step - k_blocks) % 2; }
    DEVICE int k_block(int step) const {
        return StepsOfTile(is_second(step) ? scales + to_next : scales, map, k_blocks)
            .k_block(step_of_chunk(step, k_blocks));
    }
    template <class SharedMemory>
    DEVICE void load_scales(WeightTile<SharedMemory> to, int step) const {
#pragma unroll
        for (int half = 0; half < kHalvesOfColumn; ++half)
            if (step < k_blocks || half == is_second(step))
                to.load_scale(half, scales + half * to_next + step_of_chunk(step, k_blocks));
            else
                to.no_scale(half);
    }
};
