// D[rows, N] = A[rows, K] @ B[expert, N, K]^T as in grouped_gemm.cu, for few rows per expert: it streams the weights
// once.
//
// Swap-AB: a tile is 128 rows of weights by up to 64 tokens, which are padded (`padded_tokens`) by the expert's own
// count; with TILE_TOKENS, of packed MXFP4, 256 rows by up to TILE_TOKENS.
//
// A thread block takes `columns_at_once` consecutive columns of tiles at a time, which amortises the setup of a tile
// where K is short.
//
// In:   a_map, a_tall_map  boxes of 8 rows of A, and of 32;    b_map  boxes of 128 rows of weights
//       a_scales, b_scales, table, num_tiles  as in grouped_gemm.cu; packed MXFP4: mxfp4_chunks.cuh
//       bias      BIAS: float32 [experts, N], added to each row
//       claim_pair  which of the table's counters deals out the tiles
//       done_counters, counters_per_tile  A is the result of gate_up_few_rows, which may still run (PDL), see
//                 done_counters.cuh; null: it waits for the previous kernel, which may make the table
// Out:  d         bfloat16 [rows, N]
//
// Grid: any number of thread blocks, which take tiles from the queue.
#include "device/ptx.cuh"
#include "epilogue/store_transposed.cuh"
#include "formats/row_scales.cuh"
#include "mma/swap_ab_parts.cuh"
#include "pipeline/activation_scales.cuh"
#include "pipeline/done_counters.cuh"
#include "pipeline/producer.cuh"
#include "pipeline/tile_queue.cuh"

constexpr int kBlockN = kWideTiles ? WIDE_FEW_ROWS_TILE_N : FEW_ROWS_TILE_N, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kMathThreads = 128 * kMathWarpgroups, kWarpgroupN = kBlockN / kMathWarpgroups;
constexpr int kProducers = 128, kProducerWarps = kProducers / kWarp, kThreads = kMathThreads + kProducers;
static_assert(kThreads == THREADS, "the launch has a thread for each role");
constexpr int kSlabs = kWarpgroupN / 64;                                 // of 64 rows of weights, per warpgroup
constexpr int kScaledRows = 128, kScalesOfTile = kBlockN / kScaledRows;  // of weights, with a scale each
constexpr int kBlocks = SMEM_BYTES <= 113 * 1024 ? 2 : 1;                // for which an SM has room
constexpr bool kMovesRegisters = kBlocks == 2 || kWideTiles;             // from producers to math warps
constexpr int kProducerRegisters = kWideTiles ? 72 : 32, kMathRegisters = kWideTiles ? 216 : 104;
static_assert(kProducerRegisters + kMathWarpgroups * kMathRegisters == (1 + kMathWarpgroups) * (kWideTiles ? 168 : 80),
              "the launch's registers per thread; with two blocks, which share them");
constexpr int kFullArrivals = 2;  // of a stage: the announced bytes, and the landed 4-byte copies
constexpr int kProducerBarrier = 1 + kMathWarpgroups;
constexpr int kBlockTokens = kTileTokens;
constexpr int kStagedTokens = kWideTiles ? 0 : kBlockTokens;                  // of a result
constexpr int kBoxTokens = SWIZZLE_ROWS, kTallBoxTokens = FEW_ROWS_TALL_BOX;  // of one TMA load

template <int kCount>
struct SharedTile : Once<kCount, 16, 16> {};  // which the producer's warps share
using SharedMemory =
    Stages<kAsManyAsFit, Weights<kBlockN>, Tokens<kBlockTokens>, Staging<kMathWarpgroups * kStagedTokens>,
           TokenScales<kBlockTokens + ActivationScales::kSlack>, WeightScales<kScalesOfTile>, TileOfStage<1>, Full<1>,
           Empty<1>, SharedTile<1>, WeightTables<1>>;
constexpr int kStages = SharedMemory::kStages;

using Queue = TileQueue<kBlockTokens>;
using Awaited = AwaitedRowsOf<kBlocks>;

struct Operands {
    const TensorMap *tokens, *tall_tokens;
    const WeightMap* weights;
    ActivationScales token_scales;
    const WeightScale* weight_scales;         // [experts, ceil(N / 128), K / 128]
    int n, k_blocks, steps, columns_at_once;  // steps: of a column

    DEVICE int columns() const { return (n + kBlockN - 1) / kBlockN; }
    DEVICE int scaled_blocks() const { return (n + kScaledRows - 1) / kScaledRows; }  // of an expert
};

// ---- producer: four warps, which take turns with the stages ---------------------------------------------------------

// The loads of a tile's K blocks.
struct TileLoads {
    Tile tile;
    const TensorMap* token_map;
    int padded, box_tokens, weight_row, scale_pitch, blocks;  // blocks: of kScaledRows, from the first column on
    const WeightScale* weight_scale;
    const float* token_scale;
    u32 scale_bytes, bytes;

    DEVICE TileLoads(const Operands& in, const Tile& tile) : tile(tile) {
        padded = padded_tokens(tile.rows);
        const bool low = kWideTiles || (kMoreWidths ? padded % kTallBoxTokens != 0 : padded < kTallBoxTokens);
        box_tokens = low ? kBoxTokens : kTallBoxTokens;
        token_map = low ? in.tokens : in.tall_tokens;
        int column = tile.column * in.columns_at_once;
        weight_row = tile.expert * in.n + column * kBlockN;
        scale_pitch = ::scale_pitch(*in.weights, in.k_blocks);
        blocks = in.scaled_blocks() - column * kScalesOfTile;
        weight_scale =
            scales_of_rows(in.weight_scales, tile.expert * in.scaled_blocks() + column * kScalesOfTile, scale_pitch);
        token_scale = in.token_scales.of_tile(tile);
        scale_bytes = ActivationScales::bytes(tile);
        bytes = WeightTile<SharedMemory>::kBytes + padded * kBlockK + scale_bytes;
    }
    // Of K block k, of the tile's `column`-th column.
    DEVICE void weights(SharedMemory shared, int s, const Operands& in, int column, int k) const {
        barrier_arrive_expect(shared.full(s), bytes);
        const WeightTile to(shared, s);
#pragma unroll
        for (int i = 0; i < kScalesOfTile; ++i) {
            // Where N ends within a tile, its last rows take the place of those that are not there.
            const int block = kWideTiles ? min(column * kScalesOfTile + i, blocks - 1) : column;
            to.load(i * kScaledRows, in.weights, shared.full(s), k, weight_row + block * kScaledRows);
            to.load_scale(i, weight_scale + block * scale_pitch + k);
        }
    }
    DEVICE void tokens(SharedMemory shared, int s, const Operands& in, int column, int step) const {
        const int k =
            StepsOfTile(weight_scale + column * kScalesOfTile * scale_pitch, *in.weights, in.k_blocks).k_block(step);
        int token = 0;
        if constexpr (kWideTiles)
            for (; token + kTallBoxTokens <= padded; token += kTallBoxTokens)
                tma_load(shared.tokens(s, token), in.tall_tokens, shared.full(s), k * kBlockK, tile.row + token);
        for (; token < padded; token += box_tokens)
            tma_load(shared.tokens(s, token), token_map, shared.full(s), k * kBlockK, tile.row + token);
        bulk_load(shared.token_scale(s, 0), token_scale + k * in.token_scales.k_stride, shared.full(s), scale_bytes);
        copy_async_arrive(shared.full(s));
    }
};

// A warp's next step of a tile: K block k of its `column`-th column.
struct Position {
    int column = 0, k;
    DEVICE explicit Position(int step) : k(step) {}
    DEVICE void normalize(int steps) {
        for (; k >= steps; k -= steps) ++column;
    }
};

using ProducerTurns = Turns<kProducerWarps, kStages>;

// Loads the weights of the first tile, as many K blocks as there are stages: they do not depend on the previous kernel.
// Returns their number.
DEVICE int load_weights_ahead(SharedMemory shared, const Operands& in, const Tile& tile, const ProducerTurns& turns) {
    if (tile.rows == 0) return 0;
    const TileLoads loads(in, tile);
    const int ahead = min(kStages, in.columns_at_once * in.steps);
    Position at(turns.step);
    for (int step = turns.step; step < ahead; step += kProducerWarps, at.k += kProducerWarps) {
        at.normalize(in.steps);
        if (lane_of_warp() == 0) loads.weights(shared, step, in, at.column, at.k);
    }
    return ahead;
}

DEVICE void load_tiles(SharedMemory shared, const Operands& in, Queue& queue, const DoneCounters& done, int warp) {
    ProducerTurns turns(warp);
    Tile tile = queue.tile();
    int ahead = done.counters ? load_weights_ahead(shared, in, tile, turns) : 0;
    Awaited rows(done, in.k_blocks);
    for (; tile.rows > 0; tile = share_tile(shared.at<SharedTile>(0), kProducerBarrier, queue, warp == 0), ahead = 0) {
        const TileLoads loads(in, tile);
        rows.wait(tile);
        Position at(turns.step);
        auto fill = [&](int step, int s, u32) {
            at.normalize(in.steps);
            if (lane_of_warp() == 0) {
                if (step == 0) publish_tile(shared.tile(s), tile);
                if (step >= ahead) loads.weights(shared, s, in, at.column, at.k);
                loads.tokens(shared, s, in, at.column, at.k);
            }
            at.k += kProducerWarps;
        };
        turns.fill_stages<wait_by_warp>(shared, in.steps * in.columns_at_once, fill, [&](int step) {
            if (warp == 0) queue.prepare_next(step);
        });
    }
    turns.end_tiles<1>(shared);
}

// ---- math ----------------------------------------------------------------------------------------------------------

template <int kTokens, bool kOneBase>
DEVICE void compute_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, const float* bias, u16* d,
                         const Tile& tile, int warpgroup) {
    Fragment<kTokens> sum[kSlabs];
#pragma unroll 1
    for (int column = tile.column * in.columns_at_once, end = column + in.columns_at_once; column < end; ++column) {
        auto weight_row = [&](int i) {  // N is a multiple of kScaledRows
            int row = warpgroup * kWarpgroupN + warp_row(threadIdx.x) + lane_row(threadIdx.x);
            if constexpr (kWideTiles)  // where N ends within a tile, any row will do
                row = min(row + i / 2 * kFragmentRows + row_offset(i % 2), in.n - 1 - column * kBlockN);
            else
                row += row_offset(i);
            return tile.expert * in.n + column * kBlockN + row;
        };
        const RowScales<2 * kSlabs> scales(in.weight_scales, weight_row);
        const RowBiases<2 * kSlabs> biases(bias, weight_row);
        const int first = warpgroup * kWarpgroupN, first_token = ActivationScales::offset(tile.row);
        if constexpr (kWideTiles) {
            constexpr int kMost = kTokens > 96 ? 24 : 40;  // for which there are registers
            multiply_stages_in_parts<kTokens, kMost, 1, InOrder>(shared, ring, in.steps, first, first_token, sum);
        } else if constexpr (kOneBase) {
            multiply_packed_stages<kTokens, 1, OnlyTokenScales<kTokens, InOrder>>(shared, ring, in.steps, first,
                                                                                  first_token, sum);
        } else {
            multiply_stages<kTokens>(shared, ring, in.steps, first, first_token, sum);
        }
        scales.scale(sum);
        biases.add_to(sum);
        auto row_of = [&](int token) { return d + i64(tile.row + token) * in.n; };
        const int channel = column * kBlockN + warpgroup * kWarpgroupN;
        if constexpr (kWideTiles)
#pragma unroll
            for (int slab = 0; slab < kSlabs; ++slab)
                store_transposed_in_registers<kTokens>(row_of, in.n, tile.rows, channel + slab * kFragmentRows,
                                                       sum[slab]);
        else
            store_transposed<kTokens>(shared.staging(warpgroup * kStagedTokens), warpgroup, row_of, in.n, tile.rows,
                                      channel, sum[0]);
    }
}

struct ComputeTile {
    SharedMemory shared;
    Ring<kStages>& ring;
    const Operands& in;
    const float* bias;
    u16* d;
    const Tile& tile;
    int warpgroup;
    template <int kTokens, bool kOneBase>
    DEVICE void operator()(Width<kTokens, kOneBase>) const {
        compute_tile<kTokens, kOneBase>(shared, ring, in, bias, d, tile, warpgroup);
    }
};

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    grouped_gemm_few_rows(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_tall_map,
                          const __grid_constant__ WeightMap b_map, const float* a_scales, int a_scale_expert_stride,
                          int a_scale_k_stride, const WeightScale* b_scales, u16* d, const int4* table, int* num_tiles,
                          int m, int n, int k, int claim_pair, int columns_at_once, int* done_counters,
                          int counters_per_tile, const float* bias) {
    let_next_kernel_start();
    SharedMemory shared{dynamic_shared_address()};
    init_weights(shared.at<WeightTables>(0));
    init_barriers(shared, kStages, kFullArrivals, 4 * kMathWarpgroups);

    int warpgroup = warp_uniform(threadIdx.x / 128);
    ActivationScales scales{a_scales, a_scale_expert_stride, a_scale_k_stride};
    const int k_blocks = k / kBlockK, steps = weight_steps(b_map, k_blocks);
    Operands in{&a_map, &a_tall_map, &b_map, scales, b_scales, n, k_blocks, steps, columns_at_once};
    if (warpgroup == kMathWarpgroups) {
        if constexpr (kMovesRegisters) decrease_registers<kProducerRegisters>();
        const int warp = warp_uniform(threadIdx.x / 32) - 4 * kMathWarpgroups;
        if (!done_counters) wait_for_previous_kernel();  // which made the table
        Queue queue(table, num_tiles, claim_pair, m, in.columns() / columns_at_once, steps * columns_at_once);
        load_tiles(shared, in, queue, {done_counters, counters_per_tile}, warp);
        if (done_counters) wait_for_previous_kernel();  // then the next kernel follows both
        if (warp == 0) queue.finish();
    } else {
        if constexpr (kMovesRegisters) increase_registers<kMathRegisters>();
        Ring<kStages> ring;
        while (true) {
            barrier_wait(shared.full(ring.stage), ring.phase);
            Tile tile = published_tile(shared.tile(ring.stage));
            if (tile.rows == 0) break;
            by_width(tile.rows, have_one_base(b_map), ComputeTile{shared, ring, in, bias, d, tile, warpgroup});
        }
    }
}
