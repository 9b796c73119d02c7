// The second GEMM of experts for a step of a few tokens, and their sum, weighted by the router: out[t] = the sum of
// w2[expert] @ q[expert, t] over the experts of token t, in float32.
//
// A block owns 128 channels of the result and goes through the experts in the order of their numbers, 128 of K at a
// time, each a unit, which takes a stage. Where channels are too few for the GPU, `splits` blocks of a cluster share
// them. What a block has added up for a token goes to the shared memory of the one that finishes the token, where it is
// added up in the order of the blocks.
//
// A token's result depends on no other token: an expert's number and k alone decide which block adds up a unit (of the
// only token of a step its place in the list, which gives blocks equally many). To the sums of a token that does not
// have the expert nothing is added, not even 0 times a product, which may be NaN.
//
// Launched early, behind gate_up_small_batch: weights are loaded beside it.
//
// In:   w_map     of w2: boxes of 128 rows as interleaved_map makes them, two neighbours in one thread's sums
//       q_map     of q, e4m3 [experts found * TOKENS, I]: boxes of TOKENS rows
//       w_scales  float32 [experts, H / 128, I / 128]
//       scales    float32 [experts found, I / 128, TOKENS]; kAbsent where the token does not have the expert
//       ids, expert_map  see expert_ids.cuh
//       splits    a power of two, and a divisor of CLUSTER
// Out:  out       bfloat16 [tokens, H]
#include "expert_list.cuh"
#include "fp8.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

constexpr int kTokens = TOKENS, kCluster = CLUSTER, kStages = STAGES;
constexpr int kBlockH = 128, kBlockK = 128;
constexpr int kMathWarps = 8, kMathThreads = kMathWarps * kWarp;  // a warpgroup has half of the channels
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1, kWarps = kTokenWarp + 1;
static_assert(kWarps * kWarp == THREADS, "plan.py has the same roles");
static_assert(kTokens % kCluster == 0, "the blocks that share channels finish equally many tokens");
constexpr int kFullArrivals = 3;  // who announces weights, who announces tokens, who copies the weights' scale

struct SharedMemory {
    static constexpr u32 kBytesWeights = kBlockH * kBlockK, kBytesTokens = kTokens * kBlockK;
    static constexpr u32 kTokensAt = kStages * kBytesWeights, kParts = kTokensAt + kStages * kBytesTokens;
    static constexpr u32 kScales = kParts + kTokens * kBlockH * 4;
    static constexpr u32 kWeightScales = kScales + kStages * kTokens * 4;
    static constexpr u32 kFull = (kWeightScales + kStages * 4 + 7) / 8 * 8, kEmpty = kFull + kStages * 8;
    static constexpr u32 kReceived = kEmpty + kStages * 8, kList = kReceived + 8;
    static constexpr u32 kEnd = kList + sizeof(ExpertList);

    u32 base;
    DEVICE u32 weights(int stage, int warpgroup) const {
        return base + stage * kBytesWeights + warpgroup * (kBytesWeights / 2);
    }
    DEVICE u32 tokens(int stage) const { return base + kTokensAt + stage * kBytesTokens; }
    DEVICE u32 scale(int stage, int token) const { return base + kScales + (stage * kTokens + token) * 4; }
    DEVICE u32 weight_scale(int stage) const { return base + kWeightScales + stage * 4; }
    // What a block has added up for a token; see Share.
    DEVICE u32 part(int place) const { return base + kParts + place * kBlockH * 4; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }
    DEVICE u32 received() const { return base + kReceived; }
    DEVICE ExpertList& list() const { return list_at(kList); }
};
static_assert(SharedMemory::kEnd <= SMEM_BYTES && SMEM_BYTES - SharedMemory::kEnd < 1024, "as in plan.py");

// What a block has of the work: its channels, and of the blocks that share them the number `split`.
struct Share {
    int hidden, k_blocks, splits, split, channel;
    bool one_token;

    DEVICE Share(int hidden, int intermediate, int splits, int tokens)
        : hidden(hidden), k_blocks(intermediate / kBlockK), splits(splits), one_token(tokens == 1) {
        split = split_of(blockIdx.x);
        channel = blockIdx.x / splits * kBlockH;
    }
    DEVICE bool works() const { return channel < hidden; }  // the last cluster may have more blocks than are needed
    DEVICE int split_of(int number) const { return number & (splits - 1); }
    DEVICE int first_k(int expert) const { return split_of(split - expert * k_blocks); }

    // Token t is finished by split t % splits, which gets parts of it from all, at places that follow one another.
    DEVICE int rank_of(int token) const { return blockIdx.x % kCluster - split + split_of(token); }
    DEVICE int place(int token, int from) const { return token - split_of(token) + from; }
    DEVICE int finished(int tokens) const { return (tokens - split + splits - 1) / splits; }
};

struct Unit {
    int i, k;  // block k of K of the list's expert i
};

// Goes through the units of a block.
struct Units {
    const Share& share;
    const ExpertList& list;
    int count;
    Unit unit;

    DEVICE Units(const Share& share, const ExpertList& list)
        : share(share), list(list), count(share.works() ? list.count : 0), unit{-1, share.k_blocks} {
        advance();
    }
    DEVICE bool left() const { return unit.i < count; }
    DEVICE void advance() {
        unit.k += share.splits;
        while (unit.k >= share.k_blocks && ++unit.i < count)
            unit.k = share.first_k(share.one_token ? unit.i : list.experts[unit.i]);
    }
};

// ---- producers: a warp each -----------------------------------------------------------------------------------------

// Calls load(stage, unit) by one lane for each unit, when the stage is free and `bytes` are announced. At first all
// stages are free, and filled at once, each by a lane.
template <class Load>
DEVICE void fill_stages(SharedMemory shared, Units units, u32 bytes, Load load) {
    auto fill = [&](int stage, Unit unit) {
        barrier_arrive_expect(shared.full(stage), bytes);
        load(stage, unit);
    };
    int lane = lane_of_warp();
    Unit first{-1, 0};  // of the lane
    for (int stage = 0; stage < kStages && units.left(); ++stage, units.advance())
        if (lane == stage) first = units.unit;
    if (first.i >= 0) fill(lane, first);
    Ring<kStages> ring;
#pragma unroll 1
    for (; units.left(); units.advance(), ring.advance()) {
        barrier_wait(shared.empty(ring.stage), ring.phase);
        __syncwarp();  // a lane that loads nothing would not keep the phase from going on
        if (lane == 0) fill(ring.stage, units.unit);
    }
    copy_async_wait();  // PTX promises no arrivals of threads that have exited
}

DEVICE void load_weights(SharedMemory shared, const Share& share, const TensorMap* w_map, const float* w_scales,
                         const ExpertList& list) {
    fill_stages(shared, {share, list}, SharedMemory::kBytesWeights, [&](int s, Unit unit) {
        i64 row = i64(list.experts[unit.i]) * share.hidden + share.channel;
        tma_load_4d(shared.weights(s, 0), w_map, shared.full(s), unit.k * kBlockK, 0, 0, row / 16);
        copy_async_4(shared.weight_scale(s), w_scales + row / kBlockH * share.k_blocks + unit.k);
        copy_async_arrive(shared.full(s));
    });
}

DEVICE void load_tokens(SharedMemory shared, const Share& share, const TensorMap* q_map, const float* scales,
                        const ExpertList& list) {
    wait_for_previous_kernel();
    fence_proxy_async_global();
    fill_stages(shared, {share, list}, SharedMemory::kBytesTokens + kTokens * 4, [&](int s, Unit unit) {
        tma_load(shared.tokens(s), q_map, shared.full(s), unit.k * kBlockK, unit.i * kTokens);
        const float* unit_scales = scales + (i64(unit.i) * share.k_blocks + unit.k) * kTokens;
        bulk_load(shared.scale(s, 0), unit_scales, shared.full(s), kTokens * 4);
    });
}

// ---- math -----------------------------------------------------------------------------------------------------------

// A thread holds rows lane/4 and lane/4 + 8 of its warp's 16, neighbours in the interleaved order, of tokens
// 8i + lane%4*2 and the next, at [4i] and [4i + 1], the second row's 2 behind.
using Sums = float[kTokens / 2];

DEVICE void multiply(SharedMemory shared, Units units, int warpgroup, Sums& sum) {
    int token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;
    Ring<kStages> ring;
    for (; units.left(); units.advance(), ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        Sums product;
        wgmma_fence();
        wgmma_issue_k128(product, shared.weights(s, warpgroup), shared.tokens(s));
        wgmma_commit();
        float scale[kTokens / 4], weight_scale = load_shared_float(shared.weight_scale(s));
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) scale[i] = load_shared_float(shared.scale(s, token + i / 2 * 8 + i % 2));
        wgmma_wait();
        wgmma_results_ready(product);
        __syncwarp();
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty(s));
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            float token_scale = scale[i / 4 * 2 + i % 2];
            if (!is_absent(token_scale)) sum[i] += weight_scale * token_scale * product[i];
        }
    }
}

// To the blocks that finish the tokens, two channels of a token at a time.
DEVICE void send(SharedMemory shared, const Share& share, int tokens, const Sums& sum) {
    int lane = threadIdx.x % kWarp, at = (threadIdx.x / kWarp * 8 + lane / 4) * 8;
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
        int token = i / 2 * 8 + lane % 4 * 2 + i % 2, e = i / 2 * 4 + i % 2, to = share.rank_of(token);
        u32 part = shared.part(share.place(token, share.split)) + at;
        if (token < tokens)
            store_async(in_block(part, to), make_float2(sum[e], sum[e + 2]), in_block(shared.received(), to));
    }
}

// Adds up what all have sent, two channels a thread.
DEVICE void store(SharedMemory shared, const Share& share, int tokens, u32* out) {
    constexpr int kPairs = kBlockH / 2;
    barrier_wait(shared.received(), 0);
    for (int i = threadIdx.x; i < share.finished(tokens) * kPairs; i += kMathThreads) {
        int token = i / kPairs * share.splits + share.split, pair = i % kPairs;
        float2 sum = make_float2(0.f, 0.f);
        for (int from = 0; from < share.splits; ++from) {
            float2 part = load_shared_float2(shared.part(share.place(token, from)) + pair * 8);
            sum.x += part.x, sum.y += part.y;
        }
        out[(i64(token) * share.hidden + share.channel) / 2 + pair] = pack_bf16x2(sum.x, sum.y);
    }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(THREADS, 2)
    down_small_batch(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap q_map,
                     const float* w_scales, const float* scales, const void* ids, const int* expert_map, u32* out,
                     int ids_64, int global_experts, int num_experts, int tokens, int topk, int hidden,
                     int intermediate, int splits) {
    SharedMemory shared{dynamic_shared_address()};
    const Share share(hidden, intermediate, splits, tokens);
    ExpertList& list = shared.list();
    int warp = warp_uniform(threadIdx.x / kWarp);
    if (warp == kWeightWarp) {
        if (lane_of_warp() == 0) prefetch(&w_map);
        list_experts({ids, expert_map, ids_64, tokens * topk, global_experts, num_experts}, list);
    }
    if (threadIdx.x == 0) barrier_init(shared.received(), 1);
    init_barriers(shared, kStages, kFullArrivals, kMathWarps);
    if (threadIdx.x == 0 && share.works())
        barrier_arrive_expect(shared.received(), share.finished(tokens) * splits * kBlockH * 4);
    cluster_arrive();

    if (warp == kWeightWarp) {
        load_weights(shared, share, &w_map, w_scales, list);
        cluster_wait();
    } else if (warp == kTokenWarp) {
        load_tokens(shared, share, &q_map, scales, list);
        cluster_wait();
    } else {
        Sums sum;
        multiply(shared, {share, list}, warp / 4, sum);
        cluster_wait();  // the others' barriers are there
        if (share.works()) {
            send(shared, share, tokens, sum);
            store(shared, share, tokens, out);
        }
    }
}
