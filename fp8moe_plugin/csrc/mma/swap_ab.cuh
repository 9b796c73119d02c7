// Swap-AB: 64 rows of weights are the M operand of wgmma and a few tokens the N operand, which can be as narrow as 8,
// so that less is wasted on padding. Rows of a fragment are rows of the weights, its columns are tokens.
#pragma once
#include "device/fragment.cuh"
#include "device/wgmma.cuh"
#include "formats/weights.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_table.cuh"

// The most tokens of a tile.
#ifdef TILE_TOKENS
constexpr int kTileTokens = TILE_TOKENS;
#else
constexpr int kTileTokens = kFewRowsTile;
#endif
constexpr bool kWideTiles = kTileTokens > kFewRowsTile;

// The tokens of a tile with padding: the N of its wgmma. Math warps that also decode weights have little time for
// padding, so their kernels have more widths.
constexpr bool kMoreWidths = kDecodedToRegisters;
DEVICE int padded_to_power_of_two(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }
DEVICE int padded_tokens(int rows) {
    if (kWideTiles) return min((rows + 15) / 16 * 16, kTileTokens);
    if (kMoreWidths && rows > 16 && rows <= 48) return (rows + 7) / 8 * 8;
    return padded_to_power_of_two(rows);
}

// Calls compute(Width) for a tile of `rows` tokens. one_base: all steps of its weights have the same, which only packed
// weights have; those with more bases are rare, and have the fewer widths.
template <int kTokens, bool kOneBase>
struct Width {};
template <bool kPacked = kDecodedToRegisters, class Compute>
DEVICE void by_width(int rows, bool one_base, Compute compute) {
    if constexpr (kWideTiles) {  // the plan chooses them only for weights with one base
        switch (padded_tokens(rows)) {
            case 16: return compute(Width<16, kWideTiles>{});
            case 32: return compute(Width<32, kWideTiles>{});
            case 48: return compute(Width<48, kWideTiles>{});
            case 64: return compute(Width<64, kWideTiles>{});
            case 80: return compute(Width<80, kWideTiles>{});
            case 96: return compute(Width<96, kWideTiles>{});
            case 112: return compute(Width<112, kWideTiles>{});
            default: return compute(Width<kTileTokens, kWideTiles>{});
        }
    } else {
        if constexpr (kPacked) {
            if (one_base) {
                switch (padded_tokens(rows)) {
                    case 8: return compute(Width<8, kPacked>{});
                    case 16: return compute(Width<16, kPacked>{});
                    case 24: return compute(Width<24, kPacked>{});
                    case 32: return compute(Width<32, kPacked>{});
                    case 40: return compute(Width<40, kPacked>{});
                    case 48: return compute(Width<48, kPacked>{});
                    default: return compute(Width<64, kPacked>{});
                }
            }
        }
        switch (padded_to_power_of_two(rows)) {
            case 8: return compute(Width<8, false>{});
            case 16: return compute(Width<16, false>{});
            case 32: return compute(Width<32, false>{});
            default: return compute(Width<64, false>{});
        }
    }
}

// The place of a token's scale in a stage. A token's place is the sum of those of the thread's first token and of the
// distance from it.
struct InOrder {
    DEVICE static constexpr int place(int token) { return token; }
};
// The four scales of a thread in 16 tokens are side by side. Producers have to copy scales one by one.
struct ByThread {
    DEVICE static constexpr int place(int token) {
        return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
    }
};

// The scales of a K block where all rows of a warpgroup's weights have the same one, number `i` of the tile.
// token_scale(offset) is the address of the scale of the token at that offset from the thread's first. An address in
// place of the function costs instructions in the main loop.
template <int kTokens>
struct OneScale : InOrder {
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
template <int kTokens, class Order = InOrder>
struct GateUpScales : Order {
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

// The scales of tokens alone, where those of weights are the same in all steps: of kTokens tokens of a tile, from
// kBegin on, which is a multiple of 8.
template <int kTokens, class Order, int kBegin = 0>
struct OnlyTokenScales : Order {
    float token[kTokens / 4];
    template <class TokenScale>
    DEVICE explicit OnlyTokenScales(TokenScale token_scale) {
        read(Order{}, token_scale);
    }
    DEVICE void add(float& sum, float product, int e) const { sum += token[column_index(e)] * product; }

   private:
    template <class TokenScale>
    DEVICE void read(InOrder, TokenScale token_scale) {
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) token[i] = load_shared_float(token_scale(kBegin + column_offset(i)));
    }
    // Four at once for each whole 16 tokens, and two for the 8 tokens that may be before and after those.
    template <class TokenScale>
    DEVICE void read(ByThread, TokenScale token_scale) {
        constexpr int kFirst = kBegin % 16 / 4, kLast = kFirst + (kTokens / 4 - kFirst) / 4 * 4;
        if constexpr (kFirst > 0) read_two<0>(token_scale);
#pragma unroll
        for (int i = kFirst; i < kLast; i += 4) {
            const float4 four = load_shared_float4(token_scale(kBegin + column_offset(i)));
            token[i] = four.x, token[i + 1] = four.y, token[i + 2] = four.z, token[i + 3] = four.w;
        }
        if constexpr (kLast < kTokens / 4) read_two<kLast>(token_scale);
    }
    template <int kAt, class TokenScale>
    DEVICE void read_two(TokenScale token_scale) {
        const float2 two = load_shared_float2(token_scale(kBegin + column_offset(kAt)));
        token[kAt] = two.x, token[kAt + 1] = two.y;
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
    // Before the wait: producers would overwrite them in a released stage while they are being read. Tiles of 64
    // tokens of decoded weights have no registers for that, and end their reads with a fence.
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
    int token = first_token + Scales::place(fragment_column(threadIdx.x));
    clear(sum);
    for (int step = 0; step < steps; ++step, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        auto token_scale = [&](int offset) { return shared.token_scale(s, token + Scales::place(offset)); };
        multiply_stage<kTokens, Scales>(shared, s, row, token_scale, sum);
    }
}

// The same for packed weights whose steps have the same bases, by which the sums are multiplied once: kBases of them
// for the thread's two rows.
template <int kTokens, int kBases, class Scales, class SharedMemory, int kStages>
DEVICE void multiply_packed_stages(SharedMemory shared, Ring<kStages>& ring, int steps, int row, int first_token,
                                   Fragment<kTokens> (&sum)[1]) {
    // Tiles of 64 tokens have no registers for scales before the wait. Their stages are released behind the next wait,
    // when the scales have arrived for certain.
    constexpr bool kReleaseLate = kTokens >= 64;
    const int token = first_token + Scales::place(fragment_column(threadIdx.x));
    float base[2];
    auto load_bases = [&](int stage) {
        base[0] = WeightTile(shared, stage).scale(0);
        base[1] = kBases == 2 ? WeightTile(shared, stage).scale(1) : base[0];
    };
    clear(sum);
    int s = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
        const int before = s;
        s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        auto token_scale = [&](int offset) { return shared.token_scale(s, token + Scales::place(offset)); };
        Fragment<kTokens> product;
        wgmma_issue(product, WeightTile(shared, s).operand(row), shared.tokens(s, 0));
        wgmma_commit();
        if constexpr (kReleaseLate) {
            wgmma_finish(product);
            if (step > 0) release(shared, before);
        }
        const Scales scales(token_scale);
        if constexpr (!kReleaseLate) {
            load_bases(s);
            wgmma_finish(product);
            release(shared, s);
        }
#pragma unroll
        for (int e = 0; e < kTokens / 2; ++e) scales.add(sum[0][e], product[e], e);
    }
    if constexpr (kReleaseLate) {
        load_bases(s);
        fence_proxy_async();
        release(shared, s);
    }
#pragma unroll
    for (int e = 0; e < kTokens / 2; ++e) sum[0][e] *= base[row_index(e)];
}
