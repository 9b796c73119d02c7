// The second GEMM of the experts for a small batch, with the sum weighted by the router: out[t] is the sum of
// w2[expert] @ q[expert, t] over the experts of token t, in float32. The router's weights are part of q's scales.
//
// A thread block owns 128 channels of the result, 64 per math warpgroup. It goes through the experts in ascending order
// and through the K blocks of each; each of these units takes a stage. Where the math warps decode weights there are
// two teams of them, which take the units in turn. The `splits` thread blocks of a cluster share their channels and
// take the units in turn, see cluster_sum.cuh: the partial sums that make up a token's result depend on the experts of
// all tokens.
//
// Nothing is added to the sums of a token that does not have the expert: even 0 times a product may be NaN.
//
// With PDL it runs next to gate_up_small_batch, once that lets it start: it loads weights right away, and multiplies a
// unit once its tokens have been written, which `tokens_written` counts.
//
// In:   w_map     of w2: boxes of 128 rows; packed MXFP4 and its scales: mxfp4_chunks.cuh
//       q_map     of q, e4m3 [experts listed * TOKENS, I]: boxes of TOKENS rows
//       w_scales  float32 [experts, H / 128, I / 128]
//       scales    float32 [experts listed, I / 128, TOKENS]; kAbsent where the token does not have the expert
//       tokens_written  int32 [experts listed, I / 128], tokens of a unit that have been written
//       ids, expert_map  see expert_ids.cuh; the experts are listed as in expert_list.cuh
//       BIAS: bias  float32 [experts, H], added to W2[e] @ q[e, t];    topk_weights, weight_columns,
//       routed_scale  as gate_up_small_batch
// Out:  out       bfloat16 [tokens, H]
//
// Grid: H / 128 clusters of `splits` thread blocks.
#include "epilogue/weighted_biases.cuh"
#include "formats/row_scales.cuh"
#include "mma/swap_ab.cuh"
#include "pipeline/cluster_sum.cuh"
#include "pipeline/producer.cuh"
#include "routing/expert_list.cuh"

constexpr int kTokens = TOKENS, kStages = STAGES;
constexpr int kBlockN = 128, kBlockK = 128;
constexpr int kTeams = kDecodedToRegisters ? 2 : 1, kTeamWarps = 8, kMathWarps = kTeams * kTeamWarps;
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1, kWarps = kTokenWarp + 1;
static_assert(kWarps * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kFullArrivals = 3;  // the bytes of weights, the bytes of tokens, the copied weight scale
static_assert(kStages % kTeams == 0, "a stage is always the same team's");
using Cluster = ClusterSum<kTokens, kBlockN, kTeams>;
static_assert(Cluster::kMathThreads == kMathWarps * kWarp, "who sends and stores");

template <int kCount>
struct List : Once<kCount, sizeof(ExpertList)> {};
// Unused, so that a multiprocessor has room for one block: two of a cluster would share its bandwidth.
template <int kKiB>
struct Unused : Once<kKiB, 1024> {};
using SharedMemory =
    Stages<STAGES, Weights<kBlockN>, Tokens<kTokens>, Parts<Cluster::kBytes>, TokenScales<kTokens>, WeightScales<1>,
           Full<1>, Empty<1>, Received<1>, List<1>, WeightTables<1>, Unused<kDecodedToRegisters ? 5 : 0>>;

// A thread block's share of the work: its channels, and its rank among the blocks that share them.
struct Share {
    int hidden, k_blocks, splits, split, channel;

    DEVICE Share(int hidden, int intermediate, int splits)
        : hidden(hidden), k_blocks(intermediate / kBlockK), splits(splits) {
        split = blockIdx.x % splits;
        channel = blockIdx.x / splits * kBlockN;
    }
    DEVICE int units(const ExpertList& list) const { return (list.count * k_blocks - split + splits - 1) / splits; }
};

struct Unit {
    int i, k;  // K block k of the list's expert i
};

// Iterates over the units of a thread block.
struct Units {
    int k_blocks, splits, experts;
    Unit unit;

    DEVICE Units(const Share& share, const ExpertList& list)
        : k_blocks(share.k_blocks), splits(share.splits), experts(list.count), unit{0, share.split} {
        next_expert();
    }
    DEVICE bool left() const { return unit.i < experts; }
    DEVICE void advance() {
        unit.k += splits;
        next_expert();
    }
    DEVICE void next_expert() {
        for (; unit.k >= k_blocks; unit.k -= k_blocks) ++unit.i;
    }
};

// ---- producers: one warp each --------------------------------------------------------------------------------------

// Fills a stage for each unit. All lanes call wait(count) for the next `count` units; when the stage is free and
// `bytes` are announced, one lane calls load(stage, unit). At first all stages are free and filled at once, by a lane
// each.
template <class Wait, class Load>
DEVICE void fill_stages(SharedMemory shared, Units units, u32 bytes, Wait wait, Load load) {
    auto fill = [&](int stage, Unit unit) {
        barrier_arrive_expect(shared.full(stage), bytes);
        load(stage, unit);
    };
    int lane = lane_of_warp(), count = 0;
    Unit first{-1, 0};  // of the lane
    for (; count < kStages && units.left(); ++count, units.advance())
        if (lane == count) first = units.unit;
    wait(count);
    if (first.i >= 0) fill(lane, first);
    Ring<kStages> ring;
#pragma unroll 1
    for (; units.left(); units.advance(), ring.advance()) {
        wait(1);
        wait_by_warp(shared.empty(ring.stage), ring.phase);
        if (lane == 0) fill(ring.stage, units.unit);
    }
    finish_copies();
}

DEVICE void load_weights(SharedMemory shared, const Share& share, const WeightMap* w_map, const WeightScale* w_scales,
                         const ExpertList& list) {
    auto nothing = [](int) {};
    fill_stages(shared, {share, list}, WeightTile<SharedMemory>::kBytes, nothing, [&](int s, Unit unit) {
        i64 row = i64(list.experts[unit.i]) * share.hidden + share.channel;
        const WeightTile to(shared, s);
        to.load(0, w_map, shared.full(s), unit.k, row);
        to.load_scale(0, scales_of_rows(w_scales, row / 128, scale_pitch(*w_map, share.k_blocks)) + unit.k);
        copy_async_arrive(shared.full(s));
    });
}

// Waits for the tokens of a thread block's units, in their order. A poll is a round trip to L2, so each lane polls for
// another one of the next units.
struct TokensAwaited {
    const int* tokens_written;  // of the block's next unit
    int tokens, splits, left, seen;

    DEVICE TokensAwaited(const int* tokens_written, int tokens, const Share& share, const ExpertList& list)
        : tokens_written(tokens_written + share.split),
          tokens(tokens),
          splits(share.splits),
          left(share.units(list)),
          seen(0) {}
    DEVICE void wait(int count) {
        int lane = lane_of_warp();
        while (seen < count) {
            int missing =
                __ffs(__ballot_sync(kAllLanes, lane < left && load_acquire(tokens_written + lane * splits) < tokens));
            seen = missing ? missing - 1 : kWarp;
            fence_proxy_async_global();
        }
        tokens_written += count * splits, left -= count, seen -= count;
    }
};

DEVICE void load_tokens(SharedMemory shared, const Share& share, const TensorMap* q_map, const float* scales,
                        TokensAwaited awaited, const ExpertList& list) {
    auto wait = [&](int count) { awaited.wait(count); };
    fill_stages(shared, {share, list}, SharedMemory::kBytes<Tokens> + kTokens * 4, wait, [&](int s, Unit unit) {
        tma_load(shared.tokens(s, 0), q_map, shared.full(s), unit.k * kBlockK, unit.i * kTokens);
        const float* unit_scales = scales + (i64(unit.i) * share.k_blocks + unit.k) * kTokens;
        bulk_load(shared.token_scale(s, 0), unit_scales, shared.full(s), kTokens * 4);
    });
    wait_for_previous_kernel();  // then the next kernel follows both
}

// ---- math ----------------------------------------------------------------------------------------------------------

// Nothing is added to the sums of a token that does not have the expert. Those of all experts are in one accumulator,
// so it is the products that are multiplied by scales of rows.
struct PresentScales : InOrder {
    float token[kTokens / 4], of_weights;
    RowScales<2> rows;
    template <class TokenScale>
    DEVICE PresentScales(WeightTile<SharedMemory> weights, TokenScale token_scale, const RowScales<2>& rows = {})
        : of_weights(weights.scale(0)), rows(rows) {
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) token[i] = load_shared_float(token_scale(column_offset(i)));
    }
    DEVICE void add(float& sum, float product, int e) const {
        float scale = token[column_index(e)];
        if (!is_absent(scale)) sum += rows.scaled(of_weights, row_index(e)) * scale * product;
    }
};

// multiply_stages, with the scales of rows of each unit.
DEVICE void multiply_units(SharedMemory shared, Ring<kStages>& ring, Units units, const Share& share,
                           const ExpertList& list, const WeightScale* w_scales, int first,
                           Fragment<kTokens> (&sum)[1]) {
    int row = share.channel + first + warp_row(threadIdx.x) + lane_row(threadIdx.x);
    int token = fragment_column(threadIdx.x);
    clear(sum);
    for (; units.left(); units.advance(), ring.advance()) {
        int s = ring.stage, expert_row = list.experts[units.unit.i] * share.hidden;
        const RowScales<2> rows(w_scales, [&](int i) { return expert_row + row + row_offset(i); });
        barrier_wait(shared.full(s), ring.phase);
        auto token_scale = [&](int offset) { return shared.token_scale(s, token + offset); };
        multiply_stage<kTokens, PresentScales>(shared, s, first, token_scale, sum, rows);
    }
}

// Adds the products of a team's units.
DEVICE void multiply_decoded(SharedMemory shared, int team, int units, int first, Fragment<kTokens> (&sum)[1]) {
    int token = fragment_column(threadIdx.x);
    Ring<kStages> ring{team};
    for (int unit = team; unit < units; unit += kTeams, ring.template advance_by<kTeams>()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        auto token_scale = [&](int offset) { return shared.token_scale(s, token + offset); };
        multiply_stage<kTokens, PresentScales>(shared, s, first, token_scale, sum);
    }
}

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    down_small_batch(const __grid_constant__ WeightMap w_map, const __grid_constant__ TensorMap q_map,
                     const WeightScale* w_scales, const float* scales, const int* tokens_written, const void* ids,
                     const int* expert_map, u16* out, int ids_64, int shared_expert, int routed_experts,
                     int num_experts, int tokens, int topk, int hidden, int intermediate, int splits, const float* bias,
                     const float* topk_weights, float routed_scale, int weight_columns) {
    SharedMemory shared{dynamic_shared_address()};
    const Share share(hidden, intermediate, splits);
    const Cluster cluster{shared.parts(), shared.received(0), splits, share.split, tokens};
    ExpertList& list = list_at(SharedMemory::offset<List>());
    int warp = warp_uniform(threadIdx.x / kWarp);
    if (warp == kWeightWarp) {
        if (lane_of_warp() == 0) prefetch(&w_map);
        list_experts({ids, expert_map, ids_64, shared_expert, tokens * topk, topk, routed_experts, num_experts}, list);
    }
    if (threadIdx.x == 0) cluster.init();
    init_weights(shared.at<WeightTables>(0));
    init_barriers(shared, kStages, kFullArrivals, kTeamWarps);
    cluster.arrive();

    if (warp == kWeightWarp) {
        load_weights(shared, share, &w_map, w_scales, list);
        cluster.wait();
    } else if (warp == kTokenWarp) {
        load_tokens(shared, share, &q_map, scales, {tokens_written, tokens, share, list}, list);
        cluster.wait();
    } else {
        const int team = warp / kTeamWarps, first = warp % kTeamWarps / 4 * 64;
        Fragment<kTokens> sum[1], apart;
        // Decoded weights leave no registers for both.
        Fragment<kTokens>& biases = kDecodedToRegisters ? sum[0] : apart;
        Ring<kStages> ring;
        clear(biases);
        if constexpr (kBias) {  // while gate_up_small_batch runs; once for the cluster
            const ExpertIds router{ids,           expert_map, ids_64,         shared_expert,
                                   tokens * topk, topk,       routed_experts, num_experts};
            const WeightedBiases<kTokens> weighted{bias, hidden, topk_weights, weight_columns, routed_scale, router};
            if (share.split == 0 && team == 0) weighted.load(share.channel + first, tokens, biases);
        }
        if constexpr (kScalesOfRows)
            multiply_units(shared, ring, {share, list}, share, list, w_scales, first, sum);
        else if constexpr (kDecodedToRegisters)
            multiply_decoded(shared, team, share.units(list), first, sum);
        else
            multiply_stages<kTokens, PresentScales>(shared, ring, share.units(list), first, 0, sum);
        if constexpr (kBias && !kDecodedToRegisters)
#pragma unroll
            for (int e = 0; e < kTokens / 2; ++e) sum[0][e] += biases[e];
        cluster.wait();  // the other blocks have initialized their barriers
        cluster.send(sum[0]);
        cluster.store(out, hidden, share.channel);
    }
}
