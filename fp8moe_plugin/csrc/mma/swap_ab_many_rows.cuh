// Swap-AB for tiles of many tokens and weights that are decoded to registers. An accumulator takes most registers of a
// thread, so a warpgroup multiplies one operand of 64 rows at a time, and the other warpgroup's products overlap with
// its decoding. Rows of a fragment are rows of weights, its columns are tokens.
#pragma once
#include "mma/swap_ab.cuh"

// Adds the product of 64 rows of weights and the tokens of a stage. `token_scales`: address of the scale of the
// thread's first token. kAligned: that is a multiple of 8. `meanwhile` is called while the tensor cores multiply.
template <int kTokens, int kAtOnce, bool kAligned, int kFirst = 0, class SharedMemory, class Meanwhile>
DEVICE void add_product(SharedMemory shared, int stage, const RegistersA& weights, u32 token_scales, float weight_scale,
                        Fragment<kTokens>& sum, Meanwhile meanwhile) {
    constexpr int kCount = kAtOnce < kTokens - kFirst ? kAtOnce : kTokens - kFirst, kNext = kFirst + kCount;
    Fragment<kCount> product;
    float scale[kCount / 4];
    wgmma_start(product, weights, shared.tokens(stage, kFirst));
    if constexpr (kFirst == 0) meanwhile();
#pragma unroll
    for (int i = 0; i < kCount / 4; i += 2) {
        const u32 from = token_scales + (kFirst + column_offset(i)) * 4;
        const float2 two =
            kAligned ? load_shared_float2(from) : make_float2(load_shared_float(from), load_shared_float(from + 4));
        scale[i] = two.x, scale[i + 1] = two.y;
    }
    wgmma_finish(product);
#pragma unroll
    for (int e = 0; e < kCount / 2; ++e) sum[kFirst / 2 + e] += scale[column_index(e)] * weight_scale * product[e];
    if constexpr (kNext < kTokens)
        add_product<kTokens, kAtOnce, kAligned, kNext>(shared, stage, weights, token_scales, weight_scale, sum,
                                                       meanwhile);
}

// Adds up the products of the next `steps` stages: 64 rows of weights from `row` on. `first_token`: index of the scale
// of the tile's first token in a stage. The next stage's weights are decoded during the products of a stage.
template <int kTokens, class SharedMemory, int kStages>
DEVICE void multiply_rows(SharedMemory shared, Ring<kStages>& ring, int steps, int row, int first_token,
                          Fragment<kTokens>& sum) {
    const int token = first_token + fragment_column(threadIdx.x);
    const u32 tables = shared.template at<WeightTables>(0);
    RegistersA next;
    auto decode_next = [&] {
        PackedRow rows[1][2];
        barrier_wait(shared.full(ring.stage), ring.phase);
        WeightTile<SharedMemory>(shared, ring.stage).load_packed(row, rows);
        next = decoded(rows[0][0], rows[0][1], tables);
    };
    clear(sum);
    decode_next();
    for (int step = 0; step < steps; ++step) {
        const int s = ring.stage;
        const float scale = WeightTile<SharedMemory>(shared, s).scale(0);
        const RegistersA a = next;
        ring.advance();
        add_product<kTokens, kTokens, false>(shared, s, a, shared.token_scale(s, token), scale, sum, [&] {
            if (step + 1 < steps) decode_next();
        });
        release(shared, s);
    }
}

// The same for 128 rows of a chunk from `row` on, of the gate and of the up projection: a sum of each. The thread's
// rows of a sum are those of the first and of the second slab. Tokens were copied by ordinary writes. An operand is
// decoded during the products of the one before as far as there are registers for it.
template <int kTokens, class SharedMemory, int kStages>
DEVICE void multiply_gate_and_up(SharedMemory shared, Ring<kStages>& ring, int steps, int row,
                                 Fragment<kTokens> (&sum)[2]) {
    constexpr int kAtOnce = kTokens <= 96 ? kTokens : kTokens <= 128 ? 64 : 48;
    constexpr bool kUpAhead = kTokens <= 80, kGateAhead = kTokens <= 112, kKeepsRows = kTokens <= 112;
    const int token = fragment_column(threadIdx.x);
    const u32 tables = shared.template at<WeightTables>(0);
    PackedRow rows[2][2];
    RegistersA next;
    auto decode_gate = [&] {
        barrier_wait(shared.full(ring.stage), ring.phase);
        fence_proxy_async();
        WeightTile<SharedMemory>(shared, ring.stage).load_packed(row, rows);
        next = decoded(rows[0][0], rows[1][0], tables);
    };
    clear(sum);
    if (kGateAhead) decode_gate();
    for (int step = 0; step < steps; ++step) {
        if (!kGateAhead) decode_gate();
        const int s = ring.stage;
        const WeightTile<SharedMemory> weights(shared, s);
        const u32 token_scales = shared.token_scale(s, token);
        ring.advance();
        const RegistersA gate = next;
        add_product<kTokens, kAtOnce, true>(shared, s, gate, token_scales, weights.scale(0), sum[0], [&] {
            // Always true. Without a condition ptxas decodes to registers of `gate`, and serializes the products.
            if (kUpAhead && row >= 0) next = decoded(rows[0][1], rows[1][1], tables);
        });
        if (!kKeepsRows) weights.load_packed(row, rows);
        if (!kUpAhead) next = decoded(rows[0][1], rows[1][1], tables);
        const RegistersA up = next;
        add_product<kTokens, kAtOnce, true>(shared, s, up, token_scales, weights.scale(1), sum[1], [&] {
            if (kGateAhead && step + 1 < steps) decode_gate();
        });
        release(shared, s);
    }
}
