// D[rows, N] = A[rows, K] @ B[expert, N, K]^T, e4m3 with scales per 1x128 of A and 128x128 of B, for many rows per
// expert. A are tokens, B weights.
//
// A tile is 128 rows of tokens by BLOCK_N rows of weights. One producer warp fills the stages of a ring, each a K block
// of 128: operands by TMA, the tokens' scales by bulk copies, the weights' by 4-byte copies. Two math warpgroups take
// 64 rows each. The product of a K block and 128 columns lands in one accumulator and is scaled and added to another in
// float32 before the next (DeepGEMM's two-level accumulation). Rows of a tile that belong to the next expert are
// computed and not stored. A tile may have up to 16 more rows, its tail, see mma/row_tile.cuh.
//
// KEEP_B, for K of one or two steps: a thread block takes several consecutive tiles at a time. Most of them have the
// same columns; their weights stay in shared memory.
//
// DECODED: as in gate_up.cu.
//
// PUSHED, of OUTPUT_BF16: rows go to the windows of their tokens' ranks, see window.cuh. The push ends after this
// kernel: push_sums does nothing else then.
//
// In:   a_map, a_narrow_map  boxes of 64 rows of A, and of 16;    b_map  boxes of BLOCK_N rows of weights, or their
//       chunks
//       a_scales  float32, (row, k block) at row + k * a_scale_k_stride, plus expert * a_scale_expert_stride
//       b_scales  float32 [experts, ceil(N / 128), K / 128]
//       c         the addend, as d; null without (OUTPUT_BF16 has none)
//       bias      BIAS, of OUTPUT_BF16: float32 [experts, N], added to each row
//       table, num_tiles  see tile_table.cuh
//       done_counters  as the second GEMM of the experts it shares the table and these with gate_up.cu, and may start
//                 while that still runs (PDL); null: it waits for the previous kernel, which may make the table
// Out:  d         bfloat16 or float32 [rows, N], see OUTPUT; d_map stores it for OUTPUT_BF16
//       PUSHED: d is this rank's window, c int32 [rows], the pair of each row, m the number of pairs of all ranks
//
// Grid: any number of thread blocks, one per SM, which take tiles from the queue; DECODED: of clusters of two.
#include "epilogue/result.cuh"
#include "epilogue/store_transposed.cuh"
#include "formats/row_scales.cuh"
#include "pipeline/done_counters.cuh"
#ifdef DECODED
#include "mma/decoded_row_tile.cuh"
#include "pipeline/decode_row_tile.cuh"
#include "pipeline/half_chunks.cuh"
#else
#include "pipeline/load_row_tile.cuh"
#endif

constexpr int kHalves = BLOCK_N / kHalfN;
using Queue = TileQueue<kCut, KEEP_B ? 4 : 1, kBlocksOfTile>;
using Accumulator = Fragment<kHalfN>;

// The staging area holds 64 rows of each warpgroup and part of 64 columns, then the tails.
#ifdef DECODED
static_assert(kHalves == 2 && !KEEP_B && OUTPUT == OUTPUT_BF16, "packed weights have one kernel");
constexpr int kStagedHalves = 1;  // at once: stages of chunks leave no room for two
constexpr int kStagedRows = staged_rows(kStagedHalves * kStagedRowsOfHalf);  // of a warpgroup
constexpr int kChunkStages = 5;
constexpr int kFullArrivals = 2 + kDecoderWarps;  // of a stage: the announced bytes, the scales, the decoded weights
using SharedMemory =
    DecodedRowTileStages<kChunkStages, kMathWarpgroups * kStagedRows, StagedBiases<kMathWarpgroups * BLOCK_N>>;
#else
constexpr int kStagedHalves = kHalves;
constexpr int kStagedRows = staged_rows(kStagedHalves * kStagedRowsOfHalf);  // of a warpgroup
constexpr int kFullArrivals = 2;  // of a stage: the announced bytes, and the copied weight scales
using SharedMemory = RowTileStages<kHalves, kMathWarpgroups*(kStagedRows + kHalves * kTailRows),
                                   StagedRowScales<kMathWarpgroups * BLOCK_N>, StagedBiases<kMathWarpgroups * BLOCK_N>>;
#endif
constexpr int kStages = SharedMemory::kStages;
static_assert(!(kScalesOfRows || kBias) || OUTPUT == OUTPUT_BF16,
              "stores from registers have no barrier between tiles");
#ifdef PUSHED
static_assert(OUTPUT == OUTPUT_BF16 && !(kScalesOfRows || kBias), "pushes have no barrier between tiles");
#endif

using TileRings = Rings<kStages, KEEP_B>;

#ifdef DECODED
// ---- producers: two warps ------------------------------------------------------------------------------------------

DEVICE int columns_of(const Operands& in) { return ceil_div(in.n, BLOCK_N); }

DEVICE void load_tiles(SharedMemory shared, TileRings& rings, const Operands& in, const int4* table, int* num_tiles,
                       int m, int* done_counters) {
    const int warp = threadIdx.x / kWarp - kMathWarps;
    if (warp > 1) return;
    if (!done_counters) wait_for_previous_kernel();  // which made the table
    if (warp == 0) {
        auto make_queue = [&] {
            return Queue(table, num_tiles, 1, m, ceil_div(columns_of(in), kColumnsOfTile), in.steps, done_counters);
        };
        auto loads_of = [&](const Tile& tile) { return HalfChunks(in, tile); };
        load_chunks(shared, in.steps, columns_of(in), make_queue, loads_of, [&] {
            if (done_counters) wait_for_previous_kernel();  // then the next kernel follows both
        });
    } else {
        AwaitedRows rows({done_counters, 1}, 0, kMathWarpgroups);
        auto wait = [&](const Tile& both) {
            rows.counts_per_tile = kMathWarpgroups * tiles_of_rows(both, in.k_blocks);
            rows.wait(both);
        };
        auto scales_of = [&](const Tile& tile) { return HalfScales(in, tile); };
        load_tokens(shared, rings.tokens, in, columns_of(in), wait, scales_of);
    }
}
#else
// ---- producer: one warp --------------------------------------------------------------------------------------------

struct WeightLoads {
    const TensorMap* map;
    const WeightScale* scales;
    int expert_row, column, next_half;  // next_half: offset from the scales of a half to the next half's, in floats

    DEVICE WeightLoads(const Operands& in, const Tile& tile)
        : map(in.weights), expert_row(tile.expert * in.n), column(tile.column) {
        int rows = (in.n + kHalfN - 1) / kHalfN, row = tile.column * kHalves;  // of scales
        scales = scales_of_rows(in.weight_scales, tile.expert * rows + row, in.k_blocks);
        next_half = (row + 1 < rows) * in.k_blocks;  // a tile may pass N
    }
    DEVICE void load(WeightTile<SharedMemory> to, u32 full, int k) const {
        to.load(0, map, full, k, expert_row + column * BLOCK_N);
    }
    DEVICE void load_scales(WeightTile<SharedMemory> to, int k) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) to.load_scale(half, scales + half * next_half + k);
    }
};

DEVICE void load_tiles(SharedMemory shared, TileRings& rings, const Operands& in, Queue& queue, int* done_counters) {
    AwaitedRows rows({done_counters, 1}, kMathWarpgroups * in.k_blocks,
                     kMathWarpgroups);  // counts per column, per thread block
    while (queue.index < queue.total) {
        const Tile tile = queue.tile();
        rows.wait(tile);
        load_row_tile(shared, rings, in, queue, tile, WeightLoads(in, tile));
    }
    end_tiles<1>(shared, rings.tokens);
}
#endif

// ---- math: two warpgroups ------------------------------------------------------------------------------------------

#ifdef DECODED
struct Computation {
    SharedMemory shared;
    TileRings& rings;
    const Operands& in;
    const Result& out;
    const Tile& tile;
    int warpgroup;

    template <class Part>
    DEVICE void operator()(const Part& part) const {
        typename Part::Sums sum;
        typename Part::HalfSums half;
        const int column = tile.column * BLOCK_N;
        const u32 biases = shared.at<StagedBiases>(warpgroup * BLOCK_N);
        copy_biases(biases, out.bias + tile.expert * in.n + column, min(BLOCK_N, in.n - column));
        multiply_part<false>(shared, rings.tokens, in.steps, tile, part, warpgroup, sum, half);
        await_row_values(warpgroup);
#pragma unroll
        for (int i = 0; i < Part::kBlocks; ++i) {
#pragma unroll
            for (int j = 0; j < Part::kChunks; ++j) add_to_columns(biases + (part.chunk + j) * kHalfN * 4, sum[i][j]);
            store(part, i, part.chunk * kHalfN, sum[i]);
        }
        if constexpr (Part::kHasHalf) {
            const int first = part.chunk * kHalfN + warpgroup * kHalfN / 2;
            add_to_columns(biases + first * 4, half[0]);
            store(part, 1, first, half);
        }
    }
    // `first`: the first column in the tile.
    template <class Part, class Sums>
    DEVICE void store(const Part& part, int block, int first, const Sums& sums) const {
        out.store<kStagedHalves>(shared, warpgroup * kStagedRows, tile.row + part.token(block), part.rows(tile, block),
                                 tile.column * BLOCK_N + first, warpgroup, sums);
    }
};

DEVICE void compute_tile(SharedMemory shared, TileRings& rings, const Operands& in, const Result& out, const Tile& tile,
                         int warpgroup) {
    compute_part(tile, columns_of(in), warpgroup, Computation{shared, rings, in, out, tile, warpgroup});
}
#else
template <int kCount, bool kHasTail>
DEVICE void compute_rows(SharedMemory shared, TileRings& rings, const Operands& in, const Result& out, const Tile& tile,
                         int warpgroup, int row_block, int first_half) {
    Accumulator sum[kCount];
    Tail tail[kHalves];
    auto scales_at = [&](int half, int row) {
        return shared.at<StagedRowScales>((warpgroup * kHalves + half) * kHalfN + row);
    };
    auto biases_at = [&](int half, int row) {
        return shared.at<StagedBiases>((warpgroup * kHalves + half) * kHalfN + row);
    };
    copy_row_scales(scales_at(0, 0), in.weight_scales + tile.expert * in.n + tile.column * BLOCK_N,
                    min(BLOCK_N, in.n - tile.column * BLOCK_N));
    copy_biases(biases_at(0, 0), out.bias + tile.expert * in.n + tile.column * BLOCK_N,
                min(BLOCK_N, in.n - tile.column * BLOCK_N));
    multiply_row_tile<kCount, kHalfN, kHasTail, false>(shared, rings, in.steps, tile, row_block, first_half, 0, sum,
                                                       tail);
    await_row_values(warpgroup);
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
        scale_columns(scales_at(first_half + half, 0), sum[half]);
        add_to_columns(biases_at(first_half + half, 0), sum[half]);
        if (!kHasTail) continue;
        scale_rows(scales_at(half, warpgroup * kWarpgroupM), tail[half]);
        add_to_rows(biases_at(half, warpgroup * kWarpgroupM), tail[half]);
    }
    int row = tile.row + row_block * kWarpgroupM, rows = min(kWarpgroupM, tile.rows - row_block * kWarpgroupM);
    int column = tile.column * BLOCK_N + first_half * kHalfN;
    constexpr bool kFloat = OUTPUT == OUTPUT_F32_DIRECT;
    if (OUTPUT == OUTPUT_BF16)
        out.store<kStagedHalves>(shared, warpgroup * kStagedRows, row, rows, column, warpgroup, sum);
    else
#pragma unroll
        for (int half = 0; half < kCount; ++half)
            store_direct<kFloat>(out.d, out.c, out.n, row, rows, column + half * kHalfN, sum[half]);
    if (!kHasTail) return;
    row = tile.row + kBlockM, rows = tile.rows - kBlockM, column += warpgroup * kWarpgroupM;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        if (OUTPUT == OUTPUT_BF16)
            store_transposed<kTailRows>(
                shared.staging(kMathWarpgroups * kStagedRows + (warpgroup * kHalves + half) * kTailRows), warpgroup,
                [&](int token) { return out.row(row + token); }, out.n, rows, column + half * kHalfN, tail[half]);
        else
            store_tail_direct<kFloat>(out.d, out.c, out.n, row, rows, column + half * kHalfN, tail[half]);
    }
}

DEVICE void compute_tile(SharedMemory shared, TileRings& rings, const Operands& in, const Result& out, const Tile& tile,
                         int warpgroup) {
    if (tile.rows > kBlockM)
        compute_rows<kHalves, true>(shared, rings, in, out, tile, warpgroup, warpgroup, 0);
    else if (tile.rows > warpgroup * kWarpgroupM && (kHalves == 1 || tile.rows > kWarpgroupM))
        compute_rows<kHalves, false>(shared, rings, in, out, tile, warpgroup, warpgroup, 0);
    else if (kHalves == 2)  // few rows: each warpgroup takes a half of the columns instead
        compute_rows<1, false>(shared, rings, in, out, tile, warpgroup, 0, warpgroup);
    else
        skip_row_tile(shared, rings.tokens, in.steps);
}
#endif

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_narrow_map,
                 const __grid_constant__ WeightMap b_map, const __grid_constant__ TensorMap d_map,
                 const float* a_scales, int a_scale_expert_stride, int a_scale_k_stride, const WeightScale* b_scales,
                 void* d, const void* c, int* done_counters, const int4* table, int* num_tiles, int m, int n, int k,
                 const float* bias) {
    SharedMemory shared{dynamic_shared_address()};
#ifdef DECODED
    init_decoding(shared, kFullArrivals, kMathWarps);
#else
    init_barriers(shared, kStages, kFullArrivals, kMathWarps);
#endif

    int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), k_blocks = k / kBlockK, steps = k_blocks;
#ifdef DECODED
    steps = steps_of_tile(b_map);
#endif
    ActivationScales scales{a_scales, a_scale_expert_stride, a_scale_k_stride};
    Operands in{&a_map, &a_narrow_map, &b_map, scales, b_scales, n, k_blocks, steps};
    TileRings rings;
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
#ifdef DECODED
        load_tiles(shared, rings, in, table, num_tiles, m, done_counters);
    } else if (warpgroup > kMathWarpgroups) {
        decrease_registers<kDecoderRegisters>();
        decode_tiles<false>(shared, in.steps, columns_of(in));
#else
        if (threadIdx.x / kWarp == kMathWarps) {
            if (!done_counters) wait_for_previous_kernel();  // which made the table
            Queue queue(table, num_tiles, 1, m, (n + BLOCK_N - 1) / BLOCK_N, k_blocks, done_counters);
            load_tiles(shared, rings, in, queue, done_counters);
            if (done_counters) wait_for_previous_kernel();  // then the next kernel follows both
            queue.finish();
        }
#endif
    } else {
        increase_registers<kMathRegisters>();
#ifdef DECODED
        MultiplyTurns{warpgroup}.begin();
#endif
        Result out{&d_map, d, c, m, n, bias};
        while (true) {
            barrier_wait(shared.full(rings.tokens.stage), rings.tokens.phase);
            Tile tile = published_tile(shared.tile(rings.tokens.stage));
            if (tile.rows == 0) break;
            compute_tile(shared, rings, in, out, tile, warpgroup);
        }
#ifdef DECODED
        MultiplyTurns{warpgroup}.end();
#endif
        if (threadIdx.x % kWarpgroup < storing_threads()) tma_store_wait();
    }
}
