// The first GEMM of the experts with its activation, for few rows per expert: q = quantized SiLU(gate) * up, with
// gate, up = x[a_rows[i]] @ w13[expert]^T, or x[i]. Weights are streamed once; e4m3 with scales as in grouped_gemm.cu.
//
// Swap-AB: a tile is 128 channels, their 256 rows of weights, by up to 64 tokens, or TILE_TOKENS in keys that have it,
// of packed MXFP4. Tokens are padded (`padded_tokens`). 8 rows of the gate projection are interleaved with the same 8
// of the up projection, by TMA or in packed chunks: in wgmma's layout a thread then holds both of a channel, and a tile
// holds a whole group of the quantization.
//
// Where tiles are too few for the GPU, `splits` thread blocks share a tile, with a part of K each, see split_k.cuh.
//
// In:   w_map       of w13 as [K, 8, 2, ..]: boxes of 128 x 8 x 2 x 16; packed MXFP4 and its scales: mxfp4_chunks.cuh
//       x_map       of x, e4m3 [T, K]: boxes of one row; without a_rows [m, K] in boxes of SWIZZLE_ROWS
//       x_scales    float32, (row, k block) at the sum of their products with the strides, plus
//                   expert * x_scale_expert_stride
//       w_scales    float32 [experts, 2 * I / 128, K / 128]
//       a_rows      int32 [m], the token of each row; or null
//       partial     float32 [2 * I * m * splits]; unused with one split
//       bias        BIAS: float32 [experts, 2 * I], added to the sums of all splits
//       done_counters  int32 [1 + capacity * counters_per_tile], zero at first, see done_counters.cuh; null: nothing is
//                   counted, and K is not split
// Out:  q           e4m3 [m, I];    scales  float32 [I / 128, m] at scale_pitch(m)
#include "epilogue/activated_rows.cuh"
#include "formats/row_scales.cuh"
#include "mma/swap_ab_parts.cuh"
#include "pipeline/split_k.cuh"
#include "pipeline/tile_queue.cuh"

constexpr int kBlockTokens = kTileTokens, kBlockI = 128, kBlockK = 128;
constexpr int kProducers = 128, kThreads = THREADS, kMathThreads = kThreads - kProducers;
constexpr int kMathWarpgroups = kMathThreads / 128, kMathWarps = kMathThreads / kWarp;
static_assert(kMathWarpgroups == 2 || kMathWarpgroups == 4, "each has the same number of slabs");
constexpr int kSlabs = 4 / kMathWarpgroups;  // of 64 rows of weights, per warpgroup
constexpr int kProducerRegisters = kSlabs == 2 ? 72 : 32, kMathRegisters = kSlabs == 2 ? 216 : 112;
static_assert(kProducerRegisters + kMathWarpgroups * kMathRegisters == (1 + kMathWarpgroups) * (kSlabs == 2 ? 168 : 96),
              "the launch's registers per thread");
constexpr int kProducerWarps = kProducers / kWarp - 1, kFinishWarp = kMathWarps + kProducerWarps;
constexpr int kScalePlaces = ceil_div(kBlockTokens, 16) * 16;  // see ByThread
constexpr int kFullArrivals = 1 + kWarp;  // the announced bytes of TMA, and each lane of the warp that fills the stage
constexpr int kMathBarrier = 1 + kMathWarpgroups, kProducerBarrier = kMathBarrier + 1;

template <int kCount>
struct IsLast : Once<kCount, 4> {};  // see comes_last
template <int kCount>
struct SharedTile : Once<kCount, 16, 16> {};  // which the producer's warps share
using SharedMemory =
    Stages<kAsManyAsFit, Weights<2 * kBlockI>, Tokens<kBlockTokens>, Activated<kBlockTokens>, TokenScales<kScalePlaces>,
           WeightScales<2>, TileOfStage<1>, Full<1>, Empty<1>, ActivatedTile<1>, AllActivated<1>, AllFinished<1>,
           IsLast<1>, SharedTile<1>, WeightTables<1>>;
constexpr int kStages = SharedMemory::kStages;

struct Operands {
    const WeightMap* weights;
    const TensorMap* x;
    const float* x_scales;
    int x_scale_expert_stride, x_scale_row_stride, x_scale_k_stride;
    const WeightScale* weight_scales;
    const int* a_rows;
    int intermediate, k_blocks, steps;  // steps: of a tile
    Splits splits;

    DEVICE int groups() const { return intermediate / kBlockI; }
    // The tile's first rows of the gate projection, in units of 128.
    DEVICE int gate_row(const Tile& tile) const { return tile.expert * 2 * groups() + splits.group_of(tile); }
    DEVICE const WeightScale* scales_of_rows(int block) const {
        return ::scales_of_rows(weight_scales, block, scale_pitch(*weights, k_blocks));
    }
};

struct Result {
    u8* q;
    float *scales, *partial;
    DoneCounters done;
    int m, intermediate;
    Splits splits;
    Activation activation;
    const float* bias;
};

using Queue = TileQueue<kBlockTokens>;
template <bool kPacked>
struct ScaleOrder : InOrder {};
template <>
struct ScaleOrder<true> : ByThread {};
using Order = ScaleOrder<kDecodedToRegisters>;

// ---- producer: three warps, which take turns with the stages --------------------------------------------------------

// A tile's weights: one lane loads them, two copy their scales, of the gate and of the up projection.
struct WeightLoads {
    const GateAndUp chunks;
    const WeightScale* scale;  // in lanes 0 and 1

    DEVICE WeightLoads(const Operands& in, const Tile& tile)
        : chunks(in.weights, in.gate_row(tile)),
          scale(in.scales_of_rows(in.gate_row(tile) + lane_of_warp() % 2 * in.groups())) {}
    DEVICE void start(WeightTile<SharedMemory> to, u32 full, int step) const {
        const int lane = lane_of_warp();
        if (lane == 0) to.load_gate_and_up(chunks, full, step);
        if (lane < 2) to.load_scale(lane, scale + step);
    }
};

// A tile's rows of tokens, and their scales. A lane has rows that are a warp apart. Gathered rows are boxes of one row,
// as the swizzle follows from addresses.
struct TokenLoads : StepsOfTile {
    static constexpr int kCount = ceil_div(kBlockTokens, kWarp);
    static constexpr int kAtOnce = kDecodedToRegisters ? 4 : 1;  // gathered rows
    const TensorMap* x;
    const float* scales;
    int row_stride, k_stride, rows, box_rows, token[kCount];

    DEVICE TokenLoads(const Operands& in, const Tile& tile)
        : StepsOfTile(in.scales_of_rows(in.gate_row(tile)), *in.weights, in.k_blocks),
          x(in.x),
          scales(in.x_scales + i64(tile.expert) * in.x_scale_expert_stride),
          row_stride(in.x_scale_row_stride),
          k_stride(in.x_scale_k_stride),
          rows(tile.rows),
          box_rows(in.a_rows ? 1 : SWIZZLE_ROWS) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = row_of_lane(i);
            token[i] = tile.row + row;
            if (in.a_rows) token[i] = row < rows ? in.a_rows[token[i]] : 0;
        }
    }
    DEVICE u32 bytes() const {
        const int multiple = max(box_rows, kAtOnce);  // a power of two
        return (rows + multiple - 1 & -multiple) * kBlockK;
    }
    DEVICE void start(SharedMemory shared, int s, u32 full, int step) const {
        const int k = k_block(step);
        const float* scale = scales + i64(k) * k_stride;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (row_of_lane(i) < rows)
                copy_async_4(shared.token_scale(s, place_of_lane(i)), scale + u32(token[i]) * row_stride);
        if (kAtOnce > 1 && box_rows == 1)
            load_at_once(shared, s, full, k);
        else
            load_by_lanes(shared, s, full, k);
    }

   private:
    DEVICE static int row_of_lane(int i) { return i * kWarp + lane_of_warp(); }
    DEVICE static int place_of_lane(int i) { return i * kWarp + Order::place(lane_of_warp()); }
    // Each lane loads the boxes that begin with its rows.
    DEVICE void load_by_lanes(SharedMemory shared, int s, u32 full, int k) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = row_of_lane(i);
            if (row < rows && row % box_rows == 0) tma_load(shared.tokens(s, row), x, full, k * kBlockK, token[i]);
        }
    }
    // One lane loads all rows, which takes fewer instructions: math warps that decode need nearly all issue slots.
    DEVICE void load_at_once(SharedMemory shared, int s, u32 full, int k) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll 1
            for (int lane = 0; lane < kWarp && i * kWarp + lane < rows; lane += kAtOnce) {
                int row[kAtOnce];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) row[j] = __shfl_sync(kAllLanes, token[i], lane + j);
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                    tma_load_by_one_lane(shared.tokens(s, i * kWarp + lane + j), x, full, k * kBlockK, row[j]);
            }
    }
};

DEVICE void load_tiles(SharedMemory shared, const Operands& in, Queue& queue, int warp) {
    Turns<kProducerWarps, kStages> turns(warp);
    Tile tile = queue.tile();
    for (; tile.rows > 0;
         tile = share_tile<kProducerWarps>(shared.at<SharedTile>(0), kProducerBarrier, queue, warp == 0)) {
        const WeightLoads weights(in, tile);
        const TokenLoads tokens(in, tile);
        const int first_step = in.splits.split_of(tile) * in.steps;
        const u32 bytes = WeightTile<SharedMemory>::kBytes + tokens.bytes();
        auto fill = [&](int step, int s, u32 full) {
            if (lane_of_warp() == 0) {
                if (step == 0) publish_tile(shared.tile(s), tile);
                barrier_arrive_expect(full, bytes);
            }
            __syncwarp();  // the bytes that a barrier awaits are never negative
            weights.start({shared, s}, full, first_step + step);
            tokens.start(shared, s, full, first_step + step);
            copy_async_arrive(full);
        };
        turns.fill_stages<barrier_wait>(shared, in.steps, fill, [&](int step) {
            if (warp == 0) queue.prepare_next(step);
        });
    }
    turns.end_tiles<kWarp>(shared);
    if (warp == 0) queue.finish();
}

// ---- math ----------------------------------------------------------------------------------------------------------

template <int kTokens, bool kOneBase>
DEVICE void compute_tile(SharedMemory shared, Ring<kStages>& ring, ActivatedRows& rows, const Operands& in,
                         const Result& out, const Tile& tile, int warpgroup) {
    Fragment<kTokens> sum[kSlabs];
    auto row = [&](int i) {
        int channel = in.splits.group_of(tile) * kBlockI + channel_of_slab<kSlabs>(i / 2);
        return (tile.expert * 2 + i % 2) * in.intermediate + channel;
    };
    const RowScales<2 * kSlabs> scales(in.weight_scales, row);
    const RowBiases<2 * kSlabs> biases(out.bias, row);
    const int first = warpgroup * kSlabs * 64;
    if constexpr (kWideTiles) {
        multiply_stages_in_parts<kTokens, 40, 2, ByThread>(shared, ring, in.steps, first, 0, sum);
    } else if constexpr (kOneBase) {
        multiply_packed_stages<kTokens, 2, OnlyTokenScales<kTokens, ByThread>>(shared, ring, in.steps, first, 0, sum);
    } else {
        multiply_stages<kTokens, GateUpScales<kTokens, Order>>(shared, ring, in.steps, first, 0, sum);
    }
    if (kWideTiles || in.splits.count == 1 ||
        add_splits<kTokens, kMathThreads>(shared.at<IsLast>(0), out, tile, kMathBarrier, sum)) {
        scales.scale(sum);  // once, not each split
        biases.add_to(sum);
        rows.stage<kTokens>(shared, out.activation, tile, sum);
    }
}

struct ComputeTile {
    SharedMemory shared;
    Ring<kStages>& ring;
    ActivatedRows& rows;
    const Operands& in;
    const Result& out;
    const Tile& tile;
    int warpgroup;
    template <int kTokens, bool kOneBase>
    DEVICE void operator()(Width<kTokens, kOneBase>) const {
        compute_tile<kTokens, kOneBase>(shared, ring, rows, in, out, tile, warpgroup);
    }
};

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gate_up_few_rows(const __grid_constant__ WeightMap w_map, const __grid_constant__ TensorMap x_map,
                     const float* x_scales, int x_scale_expert_stride, int x_scale_row_stride, int x_scale_k_stride,
                     const WeightScale* w_scales, const int* a_rows, u8* q, float* scales, float* partial,
                     int* done_counters, const int4* table, int* num_tiles, int m, int intermediate, int k, int splits,
                     int counters_per_tile, Activation activation, const float* bias) {
    SharedMemory shared{dynamic_shared_address()};
    init_weights(shared.at<WeightTables>(0));
    init_activated(shared, kMathWarps);
    init_barriers(shared, kStages, kFullArrivals, kMathWarps);

    const int warp = warp_uniform(threadIdx.x / kWarp), warpgroup = warp / 4;
    const Splits parts{kSlabs == 2 && !kWideTiles ? splits : 1};  // of K: see add_splits
    const int k_blocks = k / kBlockK, steps = weight_steps(w_map, k_blocks) / parts.count;
    Operands in{&w_map,
                &x_map,
                x_scales,
                x_scale_expert_stride,
                x_scale_row_stride,
                x_scale_k_stride,
                w_scales,
                a_rows,
                intermediate,
                k_blocks,
                steps,
                parts};
    const DoneCounters done{done_counters, counters_per_tile};
    const Result out{q, scales, partial, done, m, intermediate, parts, activation, bias};
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        if (warp == kFinishWarp) return finish_tiles(shared, out);
        wait_for_previous_kernel();
        let_next_kernel_start();     // not earlier: the next kernels read what route wrote without waiting
        fence_proxy_async_global();  // TMA reads what ordinary stores of other kernels wrote
        Queue queue(table, num_tiles, 0, m, in.groups() * parts.count, in.steps);
        load_tiles(shared, in, queue, warp - kMathWarps);
    } else {
        increase_registers<kMathRegisters>();
        Ring<kStages> ring;
        ActivatedRows rows;
        while (true) {
            barrier_wait(shared.full(ring.stage), ring.phase);
            Tile tile = published_tile(shared.tile(ring.stage));
            if (tile.rows == 0) break;
            by_width(tile.rows, have_one_base(w_map), ComputeTile{shared, ring, rows, in, out, tile, warpgroup});
        }
        rows.end(shared);
    }
}
