// Chooses the experts of each token from the logits of its router, as vLLM's softmax router does, and computes the
// weight of its shared expert.
//
// In:   logits   float32, or with logits_bf16 = 1 bfloat16, [T, experts]
//       padding  bool [T], whether to choose no expert: id -1 and weight 0; or null
//       x, shared_gate  bfloat16 [T, 8 * vectors] and [8 * vectors], the tokens and the gate of their shared expert; or
//                       null, if it has none
// Out:  weights  float32 [T, topk], the softmax of the chosen logits; with renormalize = 1 divided by their sum. With
//                shared_gate [T, topk + 1], the last sigmoid(shared_gate . x)
//       ids      int32 [T, topk], the largest logit first, of equal ones that with the lower index
//
// A warp per token; a lane has every 32nd expert. topk: at most 32, and at most `experts`. Grid: [blocks of tokens], or
// with shared_gate [blocks of tokens, 2]: those with y = 1 compute only its weights. With PDL it starts while the
// previous kernel runs, and before it does anything waits for its end. Then the next kernel may start, which waits for
// the ids.
#include "device/common.cuh"

// Keys are ordered as the logits: -0 equals 0, and NaN is above all. Logits are compared, not the softmax, in which
// different logits may become equal, and which every implementation of the exponential rounds in its own way.
constexpr u32 kSign = 0x80000000, kNan = 0xFFFFFFFF;
constexpr u32 kNone = 0;  // less than the key of any logit

DEVICE u32 key_of(float logit) {
    const u32 bits = __float_as_uint(logit + 0.f);  // -0 becomes 0
    return logit != logit ? kNan : bits & kSign ? ~bits : bits | kSign;
}
DEVICE float logit_of(u32 key) { return __uint_as_float(key & kSign ? key & ~kSign : ~key); }

// ---- logits: value i of a lane is of expert i * 32 + lane ----------------------------------------------------------

DEVICE float minus_infinity() { return __uint_as_float(0xFF800000); }

// -infinity for an expert that does not exist, which adds nothing to the sum of the softmax.
template <int kValues>
DEVICE void load(const void* logits, bool logits_bf16, int token, int experts, float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int expert = i * kWarp + lane_of_warp();
        const i64 at = i64(token) * experts + expert;
        values[i] = minus_infinity();
        if (expert < experts)
            values[i] =
                logits_bf16 ? bf16_value(static_cast<const u16*>(logits)[at]) : static_cast<const float*>(logits)[at];
    }
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// The softmax of a logit is exp(logit - largest) * inverse.
struct Softmax {
    float largest, inverse;

    template <int kValues>
    DEVICE explicit Softmax(const float (&values)[kValues]) {
        u32 key = kNone;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kValues; ++i) key = max(key, key_of(values[i]));
        largest = logit_of(__reduce_max_sync(kAllLanes, key));
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum += expf(values[i] - largest);
#pragma unroll
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
        inverse = 1.f / sum;
    }
    DEVICE float of(float logit) const { return expf(logit - largest) * inverse; }
};

// ---- choice --------------------------------------------------------------------------------------------------------

// Returns the weight and the id of a lane's choice; lanes from topk on have none.
template <int kValues>
DEVICE float choose(const float (&values)[kValues], int experts, int topk, bool renormalize, int& own_id) {
    const Softmax softmax(values);
    const int lane = lane_of_warp();
    u32 keys[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) keys[i] = i * kWarp + lane < experts ? key_of(values[i]) : kNone;
    float own = 0.f, sum = 0.f;
    for (int choice = 0; choice < topk; ++choice) {
        u32 key = kNone;
        int at = 0;  // the first of the lane's largest
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (keys[i] > key) key = keys[i], at = i;
        const u32 largest = __reduce_max_sync(kAllLanes, key);
        const int expert = __reduce_min_sync(kAllLanes, key == largest ? at * kWarp + lane : kAllLanes);
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (i * kWarp + lane == expert) keys[i] = kNone;
        const float score = softmax.of(logit_of(largest));
        sum += score;
        if (lane == choice) own = score, own_id = expert;
    }
    return renormalize ? own / sum : own;
}

// ---- the weight of the shared expert -------------------------------------------------------------------------------

constexpr int kVectorsInFlight = 4;  // of x and of the gate, per lane

// sigmoid(gate . x), the same on all lanes.
DEVICE float gate_weight(const uint4* x, const uint4* gate, int vectors) {
    float logit = 0.f;
    for (int first = lane_of_warp(); first < vectors; first += kVectorsInFlight * kWarp) {
        uint4 row[2][kVectorsInFlight];
#pragma unroll
        for (int i = 0; i < kVectorsInFlight; ++i) {
            const int at = first + i * kWarp;
            row[0][i] = row[1][i] = make_uint4(0, 0, 0, 0);
            if (at < vectors) row[0][i] = x[at], row[1][i] = gate[at];
        }
#pragma unroll
        for (int i = 0; i < kVectorsInFlight; ++i) {
            float value[2][8];
            unpack_eight(row[0][i], value[0]), unpack_eight(row[1][i], value[1]);
#pragma unroll
            for (int c = 0; c < 8; ++c) logit += value[0][c] * value[1][c];
        }
    }
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) logit += __shfl_xor_sync(kAllLanes, logit, lanes);
    return 1.f / (1.f + expf(-logit));
}

// ---- kernel --------------------------------------------------------------------------------------------------------

template <int kValues>
DEVICE float choose_for(const void* logits, bool logits_bf16, int token, int experts, int topk, bool renormalize,
                        int& own_id) {
    float values[kValues];
    load(logits, logits_bf16, token, experts, values);
    return choose(values, experts, topk, renormalize, own_id);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    choose_experts(const void* logits, const u8* padding, const uint4* x, const uint4* shared_gate, float* weights,
                   int* ids, int logits_bf16, int tokens, int experts, int topk, int renormalize, int vectors) {
    wait_for_previous_kernel();  // router_gemm, or whatever made the logits
    let_next_kernel_start();
    const int token = blockIdx.x * (THREADS / kWarp) + threadIdx.x / kWarp, lane = lane_of_warp();
    if (token >= tokens) return;
    const bool exists = !padding || !padding[token];
    weights += i64(token) * (shared_gate ? topk + 1 : topk);
    float weight = 0.f;
    if (blockIdx.y) {
        if (exists) weight = gate_weight(x + i64(token) * vectors, shared_gate, vectors);
        if (lane == 0) weights[topk] = weight;
        return;
    }
    int id = -1;
    if (exists) {
        if (experts <= 4 * kWarp)
            weight = choose_for<4>(logits, logits_bf16, token, experts, topk, renormalize, id);
        else if (experts <= 8 * kWarp)
            weight = choose_for<8>(logits, logits_bf16, token, experts, topk, renormalize, id);
        else
            weight = choose_for<MAX_ROUTER_EXPERTS / kWarp>(logits, logits_bf16, token, experts, topk, renormalize, id);
    }
    if (lane < topk) weights[lane] = weight, ids[i64(token) * topk + lane] = id;
}
