// The first GEMM of the experts for a small batch, with routing, quantization and activation: lists the experts of the
// batch, quantizes the tokens, and computes quantized SiLU(gate) * up of each token and each of its experts.
//
// A tile is 128 channels of an expert, their 256 rows of weights, by all tokens of the batch; which of them have the
// expert matters only in the epilogue. The thread blocks of a cluster share a tile, with a part of K each. Each block
// sends its sums of a token to the shared memory of the block that finishes the token, where they are added up in the
// order of the blocks, while the next tile is multiplied.
// Roles: two math warpgroups, for the rows of the gate and of the up projection, or for 64 channels each where chunks
// have both; a warp that loads weights; a warp for each token that the block finishes.
//
// In:   w_map       of w13, see gate_up_rows.cuh;    bias  with BIAS, float32 [experts, 2 * I], added to w13 @ x
//       x           bfloat16 [tokens, K];    w_scales  float32 [experts, 2 * I / 128, K / 128]
//       ids, expert_map  see expert_ids.cuh;    topk_weights  float32 [tokens, weight_columns]
// Out:  q           e4m3 [experts listed, TOKENS, I]; not written for a token that does not have the expert
//       scales      float32 [experts listed, I / 128, TOKENS], times the router's weight and routed_scale, but not in
//                   the shared expert's column, which has none; kAbsent for a token that does not have the expert
//       tokens_written  int32 [experts listed, I / 128], number of tokens with results in memory, per tile
// UE8M0: 1 rounds scales up to powers of two, before they are multiplied by the router's weight.
// Grid: any number of clusters; an SM has room for two thread blocks. With PDL it starts while choose_experts, which
// writes ids and topk_weights, runs. down_small_batch (PDL) starts when each block has begun to load
// `stages_before_down` stages, or all it needs: its own loads take bandwidth from these.
#include "epilogue/swiglu_token.cuh"
#include "mma/gate_up_rows.cuh"
#include "pipeline/producer.cuh"
#include "pipeline/quantize_tokens.cuh"
#include "routing/expert_list.cuh"

constexpr int kTokens = TOKENS, kCluster = CLUSTER, kStages = STAGES;
constexpr int kBlockI = 128, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kMathWarps = 8, kMathThreads = kMathWarps * kWarp, kMathBarrier = 1;
constexpr int kSlabs = 2;  // of 64 rows of weights, per warpgroup
constexpr int kStagesOfStep = kSlabs / kSlabsOfStage, kRows = kSlabsOfStage * 64;  // rows per warpgroup
constexpr int kFinished = kTokens / kCluster;                                      // tokens that a block finishes
constexpr int kSlabsAtOnce = kFinished < 4 ? kSlabsOfStage : 1;                    // more warps have too few registers
constexpr int kLoadWarp = kMathWarps, kFinishWarp = kLoadWarp + 1, kWarps = kFinishWarp + kFinished;
static_assert(kWarps * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kMostSteps = SMALL_BATCH_K_BLOCKS;  // K blocks per thread block
constexpr int kFullArrivals = 3;                  // the announced bytes of TMA, and two lanes that copy scales

// Once for the block: rows of 128 bytes and their scales, of the tokens in each of the block's K blocks.
template <int kRows>
struct X : Once<kRows, kRowOfTile, kSwizzleBytes> {};
template <int kCount>
struct XScales : Once<kCount, 4> {};
// The sums that a block of the cluster sends of a token: 128 channels of the gate or of the up projection.
template <int kCount>
struct Sums : Once<kCount, kBlockI * 4> {};
template <int kCount>
struct Taken : Once<kCount, 8, 8> {};  // all finishing warps of the cluster have taken their sums
template <int kCount>
struct List : Once<kCount, sizeof(ExpertList)> {};
using SharedMemory = Stages<STAGES, Weights<kMathWarpgroups * kRows>, X<kMostSteps * kTokens>,
                            Sums<kFinished * kCluster * 2>, XScales<kMostSteps * kTokens>, WeightScales<2>, Full<1>,
                            Empty<1>, Received<kFinished>, Taken<1>, List<1>, WeightTables<1>>;

// Of block `from` of the cluster; half 0 is the gate projection.
DEVICE u32 sums_at(SharedMemory shared, int finished, int from, int half) {
    return shared.at<Sums>((finished * kCluster + from) * 2 + half);
}

struct ProblemSize {
    int tokens, topk, hidden, intermediate;
    DEVICE int k_blocks() const { return hidden / kBlockK; }
    DEVICE int groups() const { return intermediate / kBlockI; }
};

// The block's part of K, and the cluster's tiles; tile t is group t % groups of the list's expert t / groups.
struct Share {
    int rank, first_step, steps, first_tile, tile_stride;
    DEVICE explicit Share(const ProblemSize& size) : rank(blockIdx.x % kCluster) {
        first_step = rank * size.k_blocks() / kCluster;
        steps = (rank + 1) * size.k_blocks() / kCluster - first_step;
        first_tile = blockIdx.x / kCluster, tile_stride = gridDim.x / kCluster;
    }
};

// ---- weights: one warp ---------------------------------------------------------------------------------------------

DEVICE void load_weights(SharedMemory shared, const ProblemSize& size, const Share& share, const WeightMap* w_map,
                         const WeightScale* w_scales, const ExpertList& list, int stages_before_down) {
    int half = lane_of_warp(), groups = size.groups();  // of the lanes that load
    Ring<kStages> ring;
    for (int tile = share.first_tile; tile < list.count * groups; tile += share.tile_stride) {
        int row = list.experts[tile / groups] * 2 * groups + tile % groups + half * groups;  // in units of 128 rows
        const WeightScale* scale =
            scales_of_rows(w_scales, row, scale_pitch(*w_map, size.k_blocks())) + share.first_step;
        const GateAndUp both(w_map, row);
        fill_stages<wait_by_warp>(shared, ring, 0, kStagesOfStep * share.steps, [&](int i, int s, u32 full) {
            int k = i / kStagesOfStep, slab = i % kStagesOfStep;
            if (half == 0) barrier_arrive_expect(full, WeightTile<SharedMemory>::kBytes);
            if (half < kMathWarpgroups) {
                const WeightTile to(shared, s);
                load_rows(to, w_map, both, full, share.first_step + k, row, half, slab);
                to.load_scale(half, scale + k);
                copy_async_arrive(full);
            }
            if (--stages_before_down == 0) let_next_kernel_start();
        });
    }
    if (stages_before_down > 0) let_next_kernel_start();
    finish_copies();
}

// ---- math ----------------------------------------------------------------------------------------------------------

// The thread's rows, two of each slab, are those of gate_up_rows.cuh; its columns are tokens.
using Accumulators = Fragment<kTokens>[kSlabs];

// One slab after the other: multiply_stage takes more registers, and two blocks share an SM.
DEVICE void multiply_slabs(SharedMemory shared, Ring<kStages>& ring, int step, int token, int warpgroup,
                           Accumulators& sum) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
        int s = ring.stage;
        const bool first = slab % kSlabsOfStage == 0, last = (slab + 1) % kSlabsOfStage == 0;
        if (first) barrier_wait(shared.full(s), ring.phase);
        const WeightTile weights(shared, s);
        Fragment<kTokens> product;
        int row = warpgroup * kRows + slab % kSlabsOfStage * 64;
        wgmma_start(product, weights.operand(row), shared.at<X>(step * kTokens));
        auto token_scale = [&](int offset) { return shared.at<XScales>(step * kTokens + token + offset); };
        const SlabScales<kTokens> scales(weights, token_scale, warpgroup);
        wgmma_finish(product);
        if (last) release(shared, s);
#pragma unroll
        for (int e = 0; e < kTokens / 2; ++e) scales.add(sum[slab][e], product[e], e);
        if (last) ring.advance();
    }
}

// The tokens of a step, where multiply_stage reads those of a stage.
struct TokensOfStep : SharedMemory {
    int step;
    DEVICE u32 tokens(int /*stage*/, int /*row*/) const { return at<X>(step * kTokens); }
};

DEVICE void multiply(SharedMemory shared, Ring<kStages>& ring, int steps, int warpgroup, Accumulators& sum) {
    int token = fragment_column(threadIdx.x);
    clear(sum);
    for (int step = 0; step < steps; ++step)
        if constexpr (kSlabsAtOnce == kSlabs) {
            barrier_wait(shared.full(ring.stage), ring.phase);
            auto token_scale = [&](int offset) { return shared.at<XScales>(step * kTokens + token + offset); };
            multiply_stage<kTokens, SlabScales<kTokens>>(TokensOfStep{shared, step}, ring.stage, warpgroup * kRows,
                                                         token_scale, sum, warpgroup);
            ring.advance();
        } else {
            multiply_slabs(shared, ring, step, token, warpgroup, sum);
        }
}

// Sends the sums to the blocks that finish the tokens, 16 bytes per thread and token.
DEVICE void send(SharedMemory shared, const ProblemSize& size, const Share& share, int warpgroup,
                 const Accumulators& sum) {
    int lane = threadIdx.x % kWarp, half = half_of_sums(warpgroup, lane), at = place_of_sums(lane);
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
        int token = fragment_column(lane) + column_offset(i), e = element_at(0, i);
        int to = token % kCluster, finished = token / kCluster;
        if (token < size.tokens)
            store_async(in_block(sums_at(shared, finished, share.rank, half) + at, to),
                        make_float4(sum[0][e], sum[0][e + 2], sum[1][e], sum[1][e + 2]),
                        in_block(shared.received(finished), to));
    }
}

DEVICE void compute_tiles(SharedMemory shared, const ProblemSize& size, const Share& share, int tiles, int warpgroup) {
    Ring<kStages> ring;
    u32 phase = 1;
    for (int tile = share.first_tile; tile < tiles; tile += share.tile_stride, phase ^= 1) {
        Accumulators sum;
        multiply(shared, ring, share.steps, warpgroup, sum);
        wait_by_warp(shared.at<Taken>(0), phase);
        send(shared, size, share, warpgroup, sum);
    }
}

// ---- a token's results: one warp -----------------------------------------------------------------------------------

struct Result {
    u8* q;
    float* scales;
    int* tokens_written;
    Activation activation;
    const float* bias;

    // Marks the cluster's tiles as not written, and their experts as absent. The batch has at most `most_tiles`. By a
    // warp of the first block, before its warps and the cluster's blocks meet, and before the next kernel starts.
    DEVICE void clear(const Share& share, int most_tiles) const {
        for (int i = lane_of_warp();; i += kWarp) {
            int tile = share.first_tile + i / kTokens * share.tile_stride;
            if (tile >= most_tiles) break;
            scales[i64(tile) * kTokens + i % kTokens] = kAbsent;
            if (i % kTokens == 0) tokens_written[tile] = 0;
        }
        __threadfence();  // visible to the next kernel
        __syncwarp();
    }
};

// The activation of the lane's four channels as bfloat16, from the sums of all blocks.
DEVICE uint2 activated(SharedMemory shared, int finished, const ChannelValues& values, const Activation& activation) {
    float4 half[2] = {};
#pragma unroll(kStoredPaired ? kCluster / 2 : kCluster)  // or paired ones would spill registers
    for (int from = 0; from < kCluster; ++from)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float4 part = load_shared_float4(sums_at(shared, finished, from, h) + lane_of_warp() * 16);
            half[h].x += part.x, half[h].y += part.y, half[h].z += part.z, half[h].w += part.w;
        }
    complete_sums(half, values);
    return activation.of_four(half[0], half[1]);
}

DEVICE void finish_token(SharedMemory shared, const ProblemSize& size, const Share& share, int finished,
                         const ExpertIds& router, const float* topk_weights, int weight_columns, float routed_scale,
                         const ExpertList& list, const WeightScale* w_scales, const Result& out) {
    int lane = lane_of_warp(), groups = size.groups(), token = finished * kCluster + share.rank;
    int pair = token * size.topk + lane, tiles = list.count * groups;
    int own_expert = lane < size.topk ? router.expert_of(pair) : kNoExpert;  // one lane per column of topk
    float own_weight = lane < weight_columns ? topk_weights[token * weight_columns + lane] * routed_scale : 1.f;
    u32 received = shared.received(finished), phase = 0;
    for (int tile = share.first_tile; tile < tiles; tile += share.tile_stride, phase ^= 1) {
        bool own = own_expert == list.experts[tile / groups], any = __ballot_sync(kAllLanes, own);
        const ChannelValues values(w_scales, out.bias, [&](int i) {
            int channel = channel_of_lane(tile % groups * kBlockI, lane, i % 4);
            return (list.experts[tile / groups] * 2 + i / 4) * size.intermediate + channel;
        });
        if (lane == 0) barrier_arrive_expect(received, kCluster * 2 * Sums<1>::kBytes);
        barrier_wait(received, phase);
        uint2 value = any ? activated(shared, finished, values, out.activation) : make_uint2(0, 0);
        __syncwarp();
        // Signal only blocks that will wait for it: others may have exited.
        if (lane < kCluster && tile + share.tile_stride < tiles)
            barrier_arrive_in_cluster(in_block(shared.at<Taken>(0), lane));

        if (any) {
            float weight = own ? own_weight : 0.f;
#pragma unroll
            for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) weight += __shfl_xor_sync(kAllLanes, weight, lanes);
            i64 row = tile / groups * kTokens + token;
            u8* q = out.q + row * size.intermediate + tile % groups * kBlockI;
            float scale = present_scale(weight * store_quantized(value, codes_at(q, lane)));
            if (lane == 0) out.scales[i64(tile) * kTokens + token] = scale;
            __syncwarp();
        }
        if (lane == 0 && any) count_released(out.tokens_written + tile);  // slower than a short tile, so only then
        if (lane == 0 && !any) atomicAdd(out.tokens_written + tile, 1);
    }
}

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(THREADS, 2)
    gate_up_small_batch(const __grid_constant__ WeightMap w_map, const uint4* x, const WeightScale* w_scales,
                        const void* ids, const int* expert_map, const float* topk_weights, u8* q, float* scales,
                        int* tokens_written, int ids_64, int shared_expert, int routed_experts, int num_experts,
                        int tokens, int topk, int hidden, int intermediate, float routed_scale, Activation activation,
                        const float* bias, int weight_columns, int stages_before_down) {
    SharedMemory shared{dynamic_shared_address()};
    const ProblemSize size{tokens, topk, hidden, intermediate};
    const Share share(size);
    const ExpertIds router{ids, expert_map, ids_64, shared_expert, tokens * topk, topk, routed_experts, num_experts};
    const Result result{q, scales, tokens_written, activation, bias};
    ExpertList& list = list_at(SharedMemory::offset<List>());
    int warp = warp_uniform(threadIdx.x / kWarp);
    bool math = warp < kMathWarps;
    const TokenQuantizer<kTokens, kMostSteps, kMathThreads> own_tokens(math ? x : nullptr, tokens, size.k_blocks(),
                                                                       share.first_step, share.steps);
    if (warp == kLoadWarp && lane_of_warp() == 0) prefetch(&w_map);
    init_weights(shared.at<WeightTables>(0));
    if (!math) wait_for_previous_kernel();  // choose_experts, if the layer has it: ids and weights are not there yet
    if (warp == kLoadWarp) {
        list_experts(router, list);
    } else if (warp == kFinishWarp) {
        if (share.rank == 0) result.clear(share, min(router.pairs, num_experts) * size.groups());
        if (stages_before_down == 0) let_next_kernel_start();  // else load_weights does, after init_barriers
    }
    if (threadIdx.x == 0) {
        for (int finished = 0; finished < kFinished; ++finished) barrier_init(shared.received(finished), 1);
        barrier_init(shared.at<Taken>(0), tokens);
    }
    init_barriers(shared, kStages, kFullArrivals, kMathWarps);
    cluster_arrive();

    if (math) {
        own_tokens.store(shared.at<X>(0), shared.at<XScales>(0), tokens, share.steps, kMathBarrier);
        cluster_wait();  // the other blocks have initialized their barriers
        compute_tiles(shared, size, share, list.count * size.groups(), warp / 4);
    } else if (warp == kLoadWarp) {
        load_weights(shared, size, share, &w_map, w_scales, list, stages_before_down);
        cluster_wait();
    } else {
        cluster_wait();
        int finished = warp - kFinishWarp;
        if (finished * kCluster + share.rank < tokens)
            finish_token(shared, size, share, finished, router, topk_weights, weight_columns, routed_scale, list,
                         w_scales, result);
    }
}
