// The first GEMM of the experts with its activation, for many rows per expert: D = quantized SiLU(gate) * up, as in
// silu_mul_quant.cu. [gate, up] is A @ B[expert]^T: A are tokens [m, K], B weights [experts, N, K], N = 2I, gate rows
// first.
//
// The GEMM is the same as in grouped_gemm.cu. The two halves of a tile are 128 channels of the gate projection and the
// same 128 channels of the up projection, so that each scale is computed within one warpgroup.
//
// DECODED: weights are packed, and decoded in shared memory, see decode_row_tile.cuh. Tiles have no tail then, thread
// blocks form clusters of two, and these or their warpgroups may divide a group of channels, see swiglu_chunks.cuh.
//
// In:   a_map, a_narrow_map  boxes of 64 rows of A, and of 16;    b_map  boxes of 128 rows of weights, or their chunks
//       a_scales  float32, (row, k block) at row + k * a_scale_k_stride;    b_scales  [experts, N / 128, K / 128]
//       bias      BIAS: float32 [experts, N], added to [gate, up]
//       GATHER: row i of A is row a_rows[i] of `gathered`, e4m3 [T, K], whose scales are float32 [T, K / 128]
//       table, num_tiles  see tile_table.cuh
//       done_counters  see done_counters.cuh: the stored columns of each row tile are counted, so that the second GEMM
//                 may start while this one ends (PDL); null: nothing is counted
// Out:  d         e4m3 [m, I], which d_map stores;    d_scales  float32 [I / 128, m] at scale_pitch(m)
//
// Grid: any number of thread blocks, one per SM, which take tiles from the queue; DECODED: of clusters of two.
#include "epilogue/swiglu_rows.cuh"
#include "formats/row_scales.cuh"
#ifdef DECODED
#include "epilogue/swiglu_chunks.cuh"
#include "pipeline/decode_row_tile.cuh"
#else
#include "pipeline/gather_row_tile.cuh"
#include "pipeline/load_row_tile.cuh"
#endif

constexpr int kHalves = 2;  // of a tile: gate and up
using Queue = TileQueue<kCut, 1, kBlocksOfTile>;

// The staging area holds 64 rows of each warpgroup, then the tail, which the warpgroups share.
#ifdef DECODED
static_assert(!GATHER, "packed weights have no kernel that gathers");
constexpr int kChunkStages = kBias ? 6 : 7;       // three stages are left
constexpr int kFullArrivals = 2 + kDecoderWarps;  // of a stage: the announced bytes, the scales, the decoded weights
using SharedMemory = DecodedRowTileStages<kChunkStages, kBlockM, Amax<2 * kMathWarpgroups * kWarpgroupM>,
                                          OtherAmax<kExchanges * kSenders>, AmaxThere<kExchanges>,
                                          Listed<kMathWarpgroups * StoredTiles::kMost>,
                                          StagedBiases<kMathWarpgroups * kHalves * kHalfN>>;
#else
constexpr int kFullArrivals = GATHER ? 1 + kWarpgroup : 2;  // of a stage: the announced bytes, and each copying thread
template <int kCount>
struct GatheredTile : Once<kCount, 16> {};  // which the producer's warps share
using SharedMemory =
    RowTileStages<kHalves, kBlockM + kTailRows, Amax<2 * kMathWarpgroups * kWarpgroupM>, GatheredTile<GATHER>,
                  Listed<kMathWarpgroups * StoredTiles::kMost>, StagedRowScales<kMathWarpgroups * kHalves * kHalfN>,
                  StagedBiases<kMathWarpgroups * kHalves * kHalfN>>;
#endif
constexpr int kStages = SharedMemory::kStages;
using TileRings = Rings<kStages, false>;

#ifdef DECODED
// ---- producers: two warps ------------------------------------------------------------------------------------------

// The scales of a tile's steps.
struct StepScales : StepsOfTile {
    const WeightScale* scales;
    int scales_to_up;

    DEVICE static int pitch(const Operands& in) { return scale_pitch(*in.weights, in.k_blocks); }
    DEVICE static const WeightScale* of_gate(const Operands& in, const Tile& tile) {
        return scales_of_rows(in.weight_scales, tile.expert * (in.n / kHalfN) + tile.column, pitch(in));
    }
    DEVICE StepScales(const Operands& in, const Tile& tile)
        : StepsOfTile(of_gate(in, tile), *in.weights, in.k_blocks),
          scales(of_gate(in, tile)),
          scales_to_up(in.n / kHalfN / 2 * pitch(in)) {}
    DEVICE void load_scales(WeightTile<SharedMemory> to, int step) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) to.load_scale(half, scales + half * scales_to_up + step);
    }
};

DEVICE int columns_of(const Operands& in) { return in.n / (kHalves * kHalfN); }

DEVICE void load_tiles(SharedMemory shared, TileRings& rings, const Operands& in, const int4* table, int* num_tiles,
                       int m) {
    const int warp = threadIdx.x / kWarp - kMathWarps, columns = columns_of(in);
    if (warp == 0) {
        auto make_queue = [&] { return Queue(table, num_tiles, 0, m, ceil_div(columns, kColumnsOfTile), in.steps); };
        auto loads_of = [&](const Tile& tile) {
            return GateAndUp(in.weights, tile.expert * (in.n / kHalfN) + tile.column);
        };
        load_chunks(shared, in.steps, columns, make_queue, loads_of, [] {});
    } else if (warp == 1) {
        auto scales_of = [&](const Tile& tile) { return StepScales(in, tile); };
        load_tokens(shared, rings.tokens, in, columns, [](const Tile&) {}, scales_of);
    }
}
#else
// ---- producer: one warp; with GATHER a warpgroup -------------------------------------------------------------------

struct WeightLoads {
    const TensorMap* map;
    const WeightScale* scales;
    int expert_row, column, n, scales_to_up;  // scales_to_up: offset from gate scales to up scales, in floats

    DEVICE WeightLoads(const Operands& in, const Tile& tile)
        : map(in.weights), expert_row(tile.expert * in.n), column(tile.column), n(in.n) {
        int scale_rows = (in.n + kHalfN - 1) / kHalfN;
        scales = scales_of_rows(in.weight_scales, tile.expert * scale_rows + tile.column, in.k_blocks);
        scales_to_up = scale_rows / 2 * in.k_blocks;
    }
    DEVICE void load(WeightTile<SharedMemory> to, u32 full, int k) const {
        int row = expert_row + column * kHalfN;
        to.load(0, map, full, k, row);
        to.load(kHalfN, map, full, k, row + n / 2);
    }
    DEVICE void load_scales(WeightTile<SharedMemory> to, int k) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) to.load_scale(half, scales + half * scales_to_up + k);
    }
};

DEVICE void load_tiles(SharedMemory shared, TileRings& rings, const Operands& in, Queue& queue) {
    while (queue.index < queue.total) {
        const Tile tile = queue.tile();
        load_row_tile(shared, rings, in, queue, tile, WeightLoads(in, tile));
    }
    end_tiles<1>(shared, rings.tokens);
}

DEVICE void gather_tiles(SharedMemory shared, TileRings& rings, const Operands& in, const GatheredOperand& gathered,
                         Queue& queue, bool first_warp) {
    while (true) {
        const Tile tile = share_tile(shared.at<GatheredTile>(0), kProducerBarrier, queue, first_warp);
        if (tile.rows == 0) break;
        gather_row_tile(shared, rings.tokens, gathered, tile, queue, first_warp, WeightLoads(in, tile));
    }
    end_tiles<kWarpgroup>(shared, rings.tokens);
}
#endif

// ---- math: two warpgroups ------------------------------------------------------------------------------------------

#ifdef DECODED
using Buffers = Exchange;

// The biases of a column, by the rows of a stage.
DEVICE void copy_biases_of_column(u32 to, const float* gate, int to_up) {
    if constexpr (kBias)
        for (int row = threadIdx.x % kWarpgroup; row < kHalves * kHalfN; row += kWarpgroup) {
            const int turn = row / kPairedRows, channel = turn / 2 * kPairedRows + row % kPairedRows;
            copy_async_4(to + row * 4, gate + turn % 2 * to_up + channel);
        }
}

struct Computation {
    SharedMemory shared;
    TileRings& rings;
    const Operands& in;
    const float* bias;
    const QuantizedRows& out;
    const Tile& tile;
    int warpgroup;
    Buffers& buffers;
    StoredTiles& stored;

    template <class Part>
    DEVICE void operator()(const Part& part) const {
        typename Part::Sums sum;
        typename Part::HalfSums half;
        const u32 biases = shared.at<StagedBiases>(warpgroup * kHalves * kHalfN);
        auto biases_at = [&](int row) { return biases + (part.chunk * kHalfN + row) * 4; };
        copy_biases_of_column(biases, bias + tile.expert * in.n + tile.column * kHalfN, out.channels);
        multiply_part<true>(shared, rings.tokens, in.steps, tile, part, warpgroup, sum, half);
        await_row_values(warpgroup);
#pragma unroll
        for (int i = 0; i < Part::kBlocks; ++i)
#pragma unroll
            for (int j = 0; j < Part::kChunks; ++j) add_to_columns(biases_at(j * kHalfN), sum[i][j]);
        if constexpr (Part::kHasHalf) add_to_columns(biases_at(warpgroup * kHalfN / 2), half[0]);
        store_part(shared, out, tile, part, warpgroup, buffers, stored, sum, half);
    }
};

DEVICE void compute_tile(SharedMemory shared, TileRings& rings, const Operands& in, const float* bias,
                         const QuantizedRows& out, const Tile& tile, int warpgroup, Buffers& buffers,
                         StoredTiles& stored) {
    compute_part(tile, columns_of(in), warpgroup,
                 Computation{shared, rings, in, bias, out, tile, warpgroup, buffers, stored});
}
#else
using Buffers = int;

template <int kColumns, bool kHasTail>
DEVICE void compute_rows(SharedMemory shared, TileRings& rings, const Operands& in, const float* bias,
                         const QuantizedRows& out, const Tile& tile, int warpgroup, int row_block, int column,
                         Buffers& buffer, StoredTiles& stored) {
    Fragment<kColumns> sum[kHalves];
    Tail tail[kHalves];
    auto scales_at = [&](int half, int row) {
        return shared.at<StagedRowScales>((warpgroup * kHalves + half) * kHalfN + row);
    };
    auto biases_at = [&](int half, int row) {
        return shared.at<StagedBiases>((warpgroup * kHalves + half) * kHalfN + row);
    };
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        int row = tile.expert * in.n + half * out.channels + tile.column * kHalfN;
        copy_row_scales(scales_at(half, 0), in.weight_scales + row, kHalfN);
        copy_biases(biases_at(half, 0), bias + row, kHalfN);
    }
    multiply_row_tile<kHalves, kColumns, kHasTail, GATHER>(shared, rings, in.steps, tile, row_block, 0, column, sum,
                                                           tail);
    await_row_values(warpgroup);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        scale_columns(scales_at(half, column), sum[half]);
        add_to_columns(biases_at(half, column), sum[half]);
        if (!kHasTail) continue;
        scale_rows(scales_at(half, warpgroup * kWarpgroupM), tail[half]);
        add_to_rows(biases_at(half, warpgroup * kWarpgroupM), tail[half]);
    }
    store_quantized<kColumns>(shared, out, tile, warpgroup, row_block, buffer, stored, sum[0], sum[1]);
    if (kHasTail) store_quantized_tail(shared, out, tile, warpgroup, buffer, tail[0], tail[1]);
}

DEVICE void compute_tile(SharedMemory shared, TileRings& rings, const Operands& in, const float* bias,
                         const QuantizedRows& out, const Tile& tile, int warpgroup, Buffers& buffer,
                         StoredTiles& stored) {
    if (tile.rows > kBlockM)
        compute_rows<kHalfN, true>(shared, rings, in, bias, out, tile, warpgroup, warpgroup, 0, buffer, stored);
    else if (tile.rows > kWarpgroupM)
        compute_rows<kHalfN, false>(shared, rings, in, bias, out, tile, warpgroup, warpgroup, 0, buffer, stored);
    else  // few rows: each warpgroup takes half of the channels instead
        compute_rows<kHalfN / 2, false>(shared, rings, in, bias, out, tile, warpgroup, 0, warpgroup * kHalfN / 2,
                                        buffer, stored);
}
#endif

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gate_up(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_narrow_map,
            const __grid_constant__ WeightMap b_map, const __grid_constant__ TensorMap d_map, const float* a_scales,
            int a_scale_expert_stride, int a_scale_k_stride, const WeightScale* b_scales, const uint4* gathered,
            const int* a_rows, u8* d, float* d_scales, int* done_counters, const int4* table, int* num_tiles, int m,
            int n, int k, Activation activation, const float* bias) {
    let_next_kernel_start();
    SharedMemory shared{dynamic_shared_address()};
#ifdef DECODED
    if (threadIdx.x == 0) init_exchange(shared);
    init_decoding(shared, kFullArrivals, kMathWarps);
#else
    init_barriers(shared, kStages, kFullArrivals, kMathWarps);
#endif

    int warpgroup = warp_uniform(threadIdx.x / kWarpgroup), k_blocks = k / kBlockK;
    ActivationScales scales{a_scales, a_scale_expert_stride, a_scale_k_stride};
    Operands in{&a_map, &a_narrow_map, &b_map, scales, b_scales, n, k_blocks, weight_steps(b_map, k_blocks)};
    QuantizedRows out{&d_map, d, d_scales, n / 2, m, activation};
    TileRings rings;
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
#ifdef DECODED
        load_tiles(shared, rings, in, table, num_tiles, m);
    } else if (warpgroup > kMathWarpgroups) {
        decrease_registers<kDecoderRegisters>();
        decode_tiles<true>(shared, in.steps, columns_of(in));
#else
        bool first_warp = threadIdx.x / kWarp == kMathWarps;
        if (GATHER || first_warp) {
            Queue queue(table, num_tiles, 0, m, (n + kHalves * kHalfN - 1) / (kHalves * kHalfN), k_blocks);
            if (GATHER)
                gather_tiles(shared, rings, in, {gathered, a_scales, a_rows, k_blocks}, queue, first_warp);
            else
                load_tiles(shared, rings, in, queue);
            if (first_warp) queue.finish();
        }
#endif
    } else {
        increase_registers<kMathRegisters>();
#ifdef DECODED
        MultiplyTurns{warpgroup}.begin();
#endif
        Buffers buffers{};
        StoredTiles stored{done_counters};
        while (true) {
            barrier_wait(shared.full(rings.tokens.stage), rings.tokens.phase);
            Tile tile = published_tile(shared.tile(rings.tokens.stage));
            if (tile.rows == 0) break;
            compute_tile(shared, rings, in, bias, out, tile, warpgroup, buffers, stored);
        }
#ifdef DECODED
        MultiplyTurns{warpgroup}.end();
#endif
        stored.finish(shared, warpgroup);
    }
}
