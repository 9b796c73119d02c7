// Swap-AB: 64 rows of weights are the M operand of wgmma and a few tokens the N operand, which can be as narrow as 8,
// so that less is wasted on padding. Rows of a fragment are rows of the weights, its columns are tokens.
#pragma once
#include "device/fragment.cuh"
#include "device/wgmma.cuh"
#include "formats/weights.cuh"
#include "pipeline/ring.cuh"

// The tokens of a tile with padding: the N of its wgmma. Math warps that also decode weights have little time for
// padding, so their kernels have more widths.
constexpr bool kMoreWidths = kDecodedToRegisters;
DEVICE int padded_tokens(int rows) {
    if (kMoreWidths && rows > 16 && rows <= 48) return (rows + 7) / 8 * 8;
    return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
}

// The scales of a K block where all rows of a warpgroup's weights have the same one, number `i` of the tile.
// token_scale(offset) is the address of the scale of the token at that offset from the thread's first. An address in
// place of the function costs instructions in the main loop.
template <int kTokens>
struct OneScale {
    float scale[kTokens / 4];
    template <class Weights, class TokenScale>
    DEVICE OneScale(const Weights& weights, TokenScale token_scale, int i = 0) {
        const float of_weights = weights.scale(i);
#pragma unroll
        for (int token = 0; token < kTokens / 4; ++token)
            scale[token] = load_shared_float(token_scale(column_offset(token))) * of_weights;
    }
    DEVICE void add(float& sum, float product, int e) const { sum += scale[column_index(e)] * product; }
};

// The thread's two rows of a slab are the gate and the up projection of one channel, with a scale each. The scales of
// two tokens are read at once: the compiler does not combine the reads itself.
template <int kTokens>
struct GateUpScales {
    float token[kTokens / 4], half[2];
    template <class Weights, class TokenScale>
    DEVICE GateUpScales(const Weights& weights, TokenScale token_scale) : half{weights.scale(0), weights.scale(1)} {
#pragma unroll
        for (int i = 0; i < kTokens / 4; i += 2) {
            const float2 two = load_shared_float2(token_scale(column_offset(i)));
            token[i] = two.x, token[i + 1] = two.y;
        }
    }
    DEVICE void add(float& sum, float product, int e) const {
        sum += token[column_index(e)] * half[row_index(e)] * product;
    }
};

// Adds the product of a stage: kSlabs of 64 rows of weights, from `row` on, by kTokens tokens. `others`: what else
// Scales takes.
template <int kTokens, class Scales, int kSlabs, class SharedMemory, class TokenScale, class... Others>
DEVICE void multiply_stage(SharedMemory shared, int stage, int row, TokenScale token_scale,
                           Fragment<kTokens> (&sum)[kSlabs], const Others&... others) {
    const WeightTile weights(shared, stage);
    Fragment<kTokens> product[kSlabs];
    wgmma_fence();
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
        wgmma_issue(product[slab], weights.operand(row + slab * 64), shared.tokens(stage, 0));
    wgmma_commit();
    // Before the wait: producers would overwrite them in a released stage while they are being read. The widest tiles
    // of decoded weights have no registers for that, and end their reads with a fence.
    constexpr bool kScalesFirst = !kDecodedToRegisters || kTokens < 64;
    if constexpr (!kScalesFirst) wgmma_finish(product);
    const Scales scales(weights, token_scale, others...);
    if constexpr (kScalesFirst)
        wgmma_finish(product);
    else
        fence_proxy_async();
    release(shared, stage);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
        for (int e = 0; e < kTokens / 2; ++e) scales.add(sum[slab][e], product[slab][e], e);
}

// The main loop: adds up the products of the next `steps` stages. Scales: reads a stage's scales while the tensor cores
// work, and adds a product to its sum. `first_token`: index of the scale of the tile's first token in a stage.
template <int kTokens, class Scales = OneScale<kTokens>, int kSlabs, class SharedMemory, int kStages>
DEVICE void multiply_stages(SharedMemory shared, Ring<kStages>& ring, int steps, int row, int first_token,
                            Fragment<kTokens> (&sum)[kSlabs]) {
    int token = first_token + fragment_column(threadIdx.x);
    clear(sum);
    for (int step = 0; step < steps; ++step, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        auto token_scale = [&](int offset) { return shared.token_scale(s, token + offset); };
        multiply_stage<kTokens, Scales>(shared, s, row, token_scale, sum);
    }
}
