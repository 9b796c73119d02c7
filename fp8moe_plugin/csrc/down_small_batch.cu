// The second GEMM of experts for a step of a few tokens, and their sum, weighted by the router: out[t] = the sum of
// w2[expert] @ q[expert, t] over the experts that the step has, in float32.
//
// A block owns 64 channels of the result and goes through the experts, 128 of K at a time, each a unit; a stage holds
// one for each of two warpgroups. Where channels are too few for the GPU, `splits` blocks of a cluster share them, each
// every `splits`-th unit. What the warpgroups of all of them have added up goes to the shared memory of one, and is
// added up there in a fixed order.
//
// Launched early, behind gate_up_small_batch: weights are loaded beside it.
//
// In:   w_map     of w2: boxes of 64 rows as interleaved_map makes them, two neighbours in one thread's sums
//       q_map     of q, e4m3 [experts found * TOKENS, I]: boxes of TOKENS rows
//       w_scales  float32 [experts, H / 128, I / 128]
//       scales    float32 [experts found, I / 128, TOKENS]
//       ids, expert_map  see expert_ids.cuh
// Out:  out       bfloat16 [tokens, H]
#include "expert_list.cuh"
#include "fp8.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

constexpr int kTokens = TOKENS, kCluster = CLUSTER, kStages = STAGES;
constexpr int kBlockH = 64, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kMathWarps = 4 * kMathWarpgroups, kMathThreads = kMathWarps * kWarp;
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1, kWarps = kTokenWarp + 1;
static_assert(kWarps * kWarp == THREADS, "plan.py has the same roles");
constexpr int kUnits = kMathWarpgroups;  // of a stage
static_assert(kStages * kUnits <= kWarp, "a lane for each unit of all stages");
constexpr int kFullArrivals = 2 + 2 * kUnits;  // who announces weights, who announces tokens, who loads either

struct SharedMemory {
    static constexpr u32 kBytesWeights = kBlockH * kBlockK, kBytesTokens = kTokens * kBlockK;  // of a unit
    static constexpr u32 kTokensAt = kStages * kUnits * kBytesWeights;
    static constexpr u32 kParts = kTokensAt + kStages * kUnits * kBytesTokens;
    static constexpr u32 kScales = kParts + kCluster * kMathWarpgroups * kTokens * kBlockH * 4;
    static constexpr u32 kWeightScales = kScales + kStages * kUnits * kTokens * 4;
    static constexpr u32 kFull = kWeightScales + kStages * kUnits * 4, kEmpty = kFull + kStages * 8;
    static constexpr u32 kReceived = kEmpty + kStages * 8, kList = kReceived + 8;
    static constexpr u32 kEnd = kList + sizeof(ExpertList);

    u32 base;
    DEVICE u32 weights(int stage, int i) const { return base + (stage * kUnits + i) * kBytesWeights; }
    DEVICE u32 tokens(int stage, int i) const { return base + kTokensAt + (stage * kUnits + i) * kBytesTokens; }
    DEVICE u32 scale(int stage, int i, int token) const {
        return base + kScales + ((stage * kUnits + i) * kTokens + token) * 4;
    }
    DEVICE u32 weight_scale(int stage, int i) const { return base + kWeightScales + (stage * kUnits + i) * 4; }
    // What a warpgroup has added up for a token; `from` counts the warpgroups of all splits.
    DEVICE u32 part(int from, int token) const { return base + kParts + (from * kTokens + token) * kBlockH * 4; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }
    DEVICE u32 received() const { return base + kReceived; }
    DEVICE ExpertList& list() const {
        extern __shared__ u8 dynamic_shared[];
        return *reinterpret_cast<ExpertList*>(dynamic_shared + kList);
    }
};
static_assert(SharedMemory::kEnd <= SMEM_BYTES && SMEM_BYTES - SharedMemory::kEnd < 1024, "as in plan.py");

// The channels and the units of a block. Unit u is 128 of K, u % k_blocks, of the list's expert u / k_blocks.
struct Share {
    int hidden, k_blocks, splits, split, channel, owner;

    DEVICE Share(int hidden, int intermediate, int splits)
        : hidden(hidden), k_blocks(intermediate / kBlockK), splits(splits) {
        split = blockIdx.x % splits;
        channel = blockIdx.x / splits * kBlockH;
        owner = blockIdx.x % kCluster - split;  // the block of the cluster that writes the result
    }
    DEVICE int units(int experts) const { return (experts * k_blocks - split + splits - 1) / splits; }
    DEVICE int unit(int i) const { return i * splits + split; }
};

// ---- producers: a warp each, of which a lane loads a unit of a stage ------------------------------------------------

// Calls load(stage, i, unit) by a lane for unit i of each stage, if there is one, when the stage is free and `bytes` of
// each of its units are announced. At first all stages are free, and filled at once.
template <class Load>
DEVICE void fill_stages(SharedMemory shared, const Share& share, int units, u32 bytes, Load load) {
    int lane = lane_of_warp(), i = lane % kUnits;
    auto fill = [&](int stage, int first) {
        if (i == 0) barrier_arrive_expect(shared.full(stage), bytes * min(units - first, kUnits));
        if (first + i < units) load(stage, i, share.unit(first + i));
        copy_async_arrive(shared.full(stage));
    };
    int stage = lane / kUnits;
    if (stage < kStages && stage * kUnits < units) fill(stage, stage * kUnits);
    __syncwarp();
    Ring<kStages> ring;
#pragma unroll 1
    for (int first = kStages * kUnits; first < units; first += kUnits, ring.advance()) {
        barrier_wait(shared.empty(ring.stage), ring.phase);
        if (lane < kUnits) fill(ring.stage, first);
    }
    copy_async_wait();  // PTX promises no arrivals of threads that have exited
}

DEVICE void load_weights(SharedMemory shared, const Share& share, const TensorMap* w_map, const float* w_scales,
                         const ExpertList& list, int units) {
    fill_stages(shared, share, units, SharedMemory::kBytesWeights, [&](int s, int i, int unit) {
        int k = unit % share.k_blocks;
        i64 row = i64(list.experts[unit / share.k_blocks]) * share.hidden + share.channel;
        tma_load_4d(shared.weights(s, i), w_map, shared.full(s), k * kBlockK, 0, 0, row / 16);
        copy_async_4(shared.weight_scale(s, i), w_scales + row / 128 * share.k_blocks + k);
    });
}

DEVICE void load_tokens(SharedMemory shared, const Share& share, const TensorMap* q_map, const float* scales,
                        int units) {
    wait_for_previous_kernel();
    fence_proxy_async_global();
    fill_stages(shared, share, units, SharedMemory::kBytesTokens + kTokens * 4, [&](int s, int i, int unit) {
        u32 full = shared.full(s);
        tma_load(shared.tokens(s, i), q_map, full, unit % share.k_blocks * kBlockK, unit / share.k_blocks * kTokens);
        bulk_load(shared.scale(s, i, 0), scales + i64(unit) * kTokens, full, kTokens * 4);
    });
}

// ---- math -----------------------------------------------------------------------------------------------------------

// A thread holds rows lane/4 and lane/4 + 8 of its warp's 16, neighbours in the interleaved order, of tokens
// 8i + lane%4*2 and the next, at [4i] and [4i + 1], the second row's 2 behind.
using Sums = float[kTokens / 2];

DEVICE void multiply(SharedMemory shared, int units, int warpgroup, Sums& sum) {
    int token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;
    Ring<kStages> ring;
    for (int i = warpgroup; i < units; i += kUnits, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        Sums product;
        wgmma_fence();
        wgmma_issue_k128(product, shared.weights(s, warpgroup), shared.tokens(s, warpgroup));
        wgmma_commit();
        float scale[kTokens / 4], weight_scale = load_shared_float(shared.weight_scale(s, warpgroup));
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i)
            scale[i] = weight_scale * load_shared_float(shared.scale(s, warpgroup, token + i / 2 * 8 + i % 2));
        wgmma_wait();
        wgmma_results_ready(product);
        __syncwarp();
        if (threadIdx.x % kWarp == 0) barrier_arrive(shared.empty(s));
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] += scale[i / 4 * 2 + i % 2] * product[i];
    }
}

DEVICE void send(SharedMemory shared, const Share& share, int tokens, int warpgroup, const Sums& sum) {
    int lane = threadIdx.x % kWarp, at = (threadIdx.x / kWarp % 4 * 8 + lane / 4) * 8;
    u32 received = in_block(shared.received(), share.owner);
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
        int token = i / 2 * 8 + lane % 4 * 2 + i % 2, e = i / 2 * 4 + i % 2;
        u32 part = shared.part(share.split * kMathWarpgroups + warpgroup, token) + at;
        if (token < tokens) store_async(in_block(part, share.owner), make_float2(sum[e], sum[e + 2]), received);
    }
}

// Adds up what all have sent, two channels a thread.
DEVICE void store(SharedMemory shared, const Share& share, int tokens, u32* out) {
    barrier_wait(shared.received(), 0);
    for (int i = threadIdx.x; i < tokens * (kBlockH / 2); i += kMathThreads) {
        int token = i / (kBlockH / 2), pair = i % (kBlockH / 2);
        float2 sum = make_float2(0.f, 0.f);
        for (int from = 0; from < share.splits * kMathWarpgroups; ++from) {
            float2 part = load_shared_float2(shared.part(from, token) + pair * 8);
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
    const Share share(hidden, intermediate, splits);
    ExpertList& list = shared.list();
    bool owns = share.split == 0 && share.channel < hidden;
    int warp = warp_uniform(threadIdx.x / kWarp);
    if (warp == kWeightWarp) {
        if (lane_of_warp() == 0) prefetch(&w_map);
        list_experts({ids, expert_map, ids_64, tokens * topk, global_experts, num_experts}, list);
    }
    if (threadIdx.x == 0) barrier_init(shared.received(), 1);
    init_barriers(shared, kStages, kFullArrivals, kMathWarps);
    if (threadIdx.x == 0 && owns)
        barrier_arrive_expect(shared.received(), splits * kMathWarpgroups * tokens * kBlockH * 4);
    cluster_arrive();

    bool works = share.channel < hidden;  // the last cluster may have more blocks than there are channels
    int units = works ? share.units(list.count) : 0;
    if (warp == kWeightWarp) {
        load_weights(shared, share, &w_map, w_scales, list, units);
        cluster_wait();
    } else if (warp == kTokenWarp) {
        load_tokens(shared, share, &q_map, scales, units);
        cluster_wait();
    } else {
        Sums sum;
        multiply(shared, units, warp / 4, sum);
        cluster_wait();  // the owner's barrier is there
        if (works) send(shared, share, tokens, warp / 4, sum);
        if (owns) store(shared, share, tokens, out);
    }
}
