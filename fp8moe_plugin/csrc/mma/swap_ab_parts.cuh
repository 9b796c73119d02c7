// Swap-AB by more tokens than a thread has registers for their product: packed weights are decoded once, and multiplied
// by parts of the tokens. The product of a part is added to its sums while the tensor cores work on the next one.
#pragma once
#include "mma/swap_ab.cuh"

// Parts of at most kMost of kTokens tokens, as equal as multiples of 8 allow.
template <int kTokens, int kMost>
struct PartsOf {
    static constexpr int kCount = ceil_div(kTokens, kMost), kLongest = ceil_div(kTokens / 8, kCount) * 8;
    DEVICE static constexpr int begin(int part) { return kTokens / 8 * part / kCount * 8; }
    DEVICE static constexpr int size(int part) { return begin(part + 1) - begin(part); }
};

// A stage of a warpgroup. A unit is the product of one slab of 64 rows of weights by one part of the tokens; the slabs
// of a part are consecutive, and share the scales of its tokens. Two units are in flight.
template <int kTokens, class Parts, int kSlabs, class Order, class SharedMemory>
struct StageInParts {
    static constexpr int kUnits = Parts::kCount * kSlabs;
    DEVICE static constexpr int part(int unit) { return unit / kSlabs; }
    template <int kUnit>
    using Product = Fragment<Parts::size(part(kUnit))>;
    using Products = Fragment<Parts::kLongest>[2];

    SharedMemory shared;
    int stage, row, token;
    bool never;
    RegistersA (&weights)[kSlabs];
    Products& products;
    Fragment<kTokens> (&sum)[kSlabs];

    template <int kUnit>
    DEVICE auto product() const -> Product<kUnit>& {
        return reinterpret_cast<Product<kUnit>&>(products[kUnit % 2]);
    }
    // The second slab is decoded while the first one is being multiplied.
    template <int kUnit>
    DEVICE void start() const {
        RegistersA& a = weights[kUnit % kSlabs];
        if constexpr (kUnit < kSlabs) {
            a = WeightTile(shared, stage).operand(row + kUnit * 64);
            wgmma_registers_written(a);
        }
        wgmma_issue_written(product<kUnit>(), a, shared.tokens(stage, Parts::begin(part(kUnit))), never);
        wgmma_commit();
    }
    // After the wait: until here ptxas does not give the registers that wgmma reads to other values.
    DEVICE void keep_weights() const {
        if (!never) return;
        u32 all = 0;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) all += weights[slab].row[step][i];
        store_shared(shared.tokens(stage, 0), all);
    }
    // Starts the next unit, adds the product of this one, which has been started, and goes on.
    template <int kUnit>
    DEVICE void finish() const {
        // Added to the token, the place costs more instructions in the main loop.
        finish<kUnit>([&](int offset) { return shared.token_scale(stage, token) + 4 * Order::place(offset); });
    }
    // `from`: the scales of the part, or the addresses of the tokens'.
    template <int kUnit, class From>
    DEVICE void finish(const From& from) const {
        constexpr int kBegin = Parts::begin(part(kUnit)), kSize = Parts::size(part(kUnit));
        constexpr bool kLast = kUnit + 1 == kUnits;
        if constexpr (!kLast) start<kUnit + 1>();
        const OnlyTokenScales<kSize, Order, kBegin> scales(from);  // before the wait, see release
        if constexpr (kLast)
            wgmma_wait();
        else
            wgmma_wait_for_earlier();
        wgmma_results_ready(product<kUnit>());
        if constexpr (kLast) {
            keep_weights();
            release(shared, stage);
        }
#pragma unroll
        for (int e = 0; e < kSize / 2; ++e) scales.add(sum[kUnit % kSlabs][kBegin / 2 + e], product<kUnit>()[e], e);
        if constexpr (!kLast) {
            if constexpr (part(kUnit + 1) == part(kUnit))
                finish<kUnit + 1>(scales);
            else
                finish<kUnit + 1>();
        }
    }
};

// multiply_packed_stages, by parts of at most kMost tokens.
template <int kTokens, int kMost, int kBases, class Order, int kSlabs, class SharedMemory, int kStages>
DEVICE void multiply_stages_in_parts(SharedMemory shared, Ring<kStages>& ring, int steps, int row, int first_token,
                                     Fragment<kTokens> (&sum)[kSlabs]) {
    using Stage = StageInParts<kTokens, PartsOf<kTokens, kMost>, kSlabs, Order, SharedMemory>;
    const int token = first_token + Order::place(fragment_column(threadIdx.x));
    // Always false, which the compiler does not know: so it takes a product to depend on the one before the last, and
    // gives both the same registers. Else it delays additions, and has no registers for all products that wait for
    // them.
    const bool never = shared.base >> 30;
    typename Stage::Products products;
    float base[2];
    clear(products);
    clear(sum);
    for (int step = 0; step < steps; ++step, ring.advance()) {
        const int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        RegistersA weights[kSlabs];
        const Stage stage{shared, s, row, token, never, weights, products, sum};
        stage.template start<0>();
        base[0] = WeightTile(shared, s).scale(kBases == 2 ? 0 : row / 128);
        base[1] = kBases == 2 ? WeightTile(shared, s).scale(1) : base[0];
        stage.template finish<0>();
    }
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
        for (int e = 0; e < kTokens / 2; ++e) sum[slab][e] *= base[row_index(e)];
}
