// Swap-AB: 128 rows of weights are the 64-row operands of the two math warpgroups, tokens are the narrow operand. What
// kernels of few tokens share, whichever way they find their tiles.
#pragma once
#include "device/wgmma.cuh"
#include "pipeline/ring.cuh"

constexpr int kBlockN = 128, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kMathThreads = 128 * kMathWarpgroups, kWarpgroupN = kBlockN / kMathWarpgroups;
constexpr int kThreads = kMathThreads + 128;
static_assert(kThreads == THREADS, "plan.py has the same roles");
constexpr int kFullArrivals = 2;  // of a stage: the bytes of bulk copies are announced; the small copies have landed

// A tile's next `steps` of 128 K. The scale of its first token is the `first_scale`th of a stage. A thread holds weight
// rows lane/4 and lane/4 + 8 of its warp's 16, tokens 8i + lane%4*2 and the next.
template <int kTokens, class SharedMemory, int kStages>
DEVICE void multiply_tile(SharedMemory shared, Ring<kStages>& ring, int steps, int first_scale, int warpgroup,
                          float (&sum)[kTokens / 2]) {
    int lane = threadIdx.x % 32, token = first_scale + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;

    for (int step = 0; step < steps; ++step, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        float weight_scale = load_shared_float(shared.weight_scale(s)), scale[kTokens / 4];
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i)
            scale[i] = load_shared_float(shared.token_scale(s, token + i / 2 * 8 + i % 2)) * weight_scale;
        float product[kTokens / 2];
        wgmma_k128(product, shared.weights(s, warpgroup), shared.tokens(s, 0));
        release(shared, s);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] += scale[i / 4 * 2 + i % 2] * product[i];
    }
}
