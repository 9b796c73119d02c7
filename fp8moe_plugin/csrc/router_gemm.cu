// Logits of a router for few tokens: x @ weight^T.
//
// In:   x       bfloat16 [tokens, K], K = 32 * steps
//       weight  bfloat16 [experts, K]
// Out:  logits  bfloat16 [tokens, experts], sums in float32, rounded once
//
// A block multiplies 16 tokens by 8 experts. Its warps share K in steps of 32 channels, each with loads of many steps
// in flight, straight into the registers of mma; then the block adds up the warps' sums. A token's logits do not depend
// on the other tokens. Grid: [blocks of experts, blocks of tokens]. With PDL it waits for the previous kernel before it
// does anything; then the next kernel may start.
#include "device/mma.cuh"

constexpr int kTokens = 16, kExperts = 8, kSums = kTokens * kExperts;  // of a block
constexpr int kWarps = THREADS / kWarp, kPartialSums = kWarps * kSums;
constexpr int kStepsInFlight = 8;
constexpr int kVectors = 4;  // of 8 channels, in a step: one per lane of four

// ---- products: each warp of its steps ------------------------------------------------------------------------------

// A lane's 8 channels of a row in each of several steps. mma may take the channels in any order, if both operands have
// the same: the first takes channels 0 to 3 of each lane, the second 4 to 7.
using Row = uint4[kStepsInFlight];

DEVICE void load(const uint4* row, bool exists, int first, int steps, Row& values) {
#pragma unroll
    for (int i = 0; i < kStepsInFlight; ++i) {
        const int step = first + i * kWarps;
        values[i] = make_uint4(0, 0, 0, 0);
        if (exists && step < steps) values[i] = row[step * kVectors];
    }
}

// The sums of 16 tokens and 8 experts over the warp's steps, as mma spreads them over lanes.
DEVICE void multiply(const uint4* x, const uint4* weight, int tokens, int experts, int steps, float (&sum)[4]) {
    const int lane = lane_of_warp(), row = lane / kVectors, token = blockIdx.y * kTokens + row;
    const int expert = blockIdx.x * kExperts + row;
    const i64 vectors = i64(steps) * kVectors;
    const uint4* low = x + token * vectors + lane % kVectors;
    const uint4* high = low + kTokens / 2 * vectors;
    weight += expert * vectors + lane % kVectors;
    float odd[4] = {};
    for (int first = threadIdx.x / kWarp; first < steps; first += kStepsInFlight * kWarps) {
        Row w, a, b;
        load(weight, expert < experts, first, steps, w);
        load(low, token < tokens, first, steps, a);
        load(high, token + kTokens / 2 < tokens, first, steps, b);
#pragma unroll
        for (int i = 0; i < kStepsInFlight; ++i) {
            mma_bf16(sum, {a[i].x, b[i].x, a[i].y, b[i].y}, {w[i].x, w[i].y});
            mma_bf16(odd, {a[i].z, b[i].z, a[i].w, b[i].w}, {w[i].z, w[i].w});
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += odd[i];
}

// ---- kernel --------------------------------------------------------------------------------------------------------

// One block per SM, or ptxas would spare registers, and fewer loads would be in flight.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    router_gemm(const uint4* x, const uint4* weight, u16* logits, int tokens, int experts, int steps) {
    __shared__ float partial_sums[kPartialSums];
    wait_for_previous_kernel();
    let_next_kernel_start();
    float sum[4] = {};
    multiply(x, weight, tokens, experts, steps, sum);
    const int lane = lane_of_warp(), at = threadIdx.x / kWarp * kSums + lane / 4 * kExperts + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) partial_sums[at + i / 2 * kSums / 2 + i % 2] = sum[i];
    __syncthreads();
    if (threadIdx.x >= kSums) return;
    const int token = blockIdx.y * kTokens + threadIdx.x / kExperts;
    const int expert = blockIdx.x * kExperts + threadIdx.x % kExperts;
    if (token >= tokens || expert >= experts) return;
    float logit = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) logit += partial_sums[warp * kSums + threadIdx.x];
    logits[i64(token) * experts + expert] = bf16_bits(logit);
}
