// D[m, N] = A[m, K] @ B[N, K]^T, for few rows: a stream of weights.
//
// Swap-AB: a block takes 64 columns of the result at a time, whose weights are the 64-row operand of its math
// warpgroup; up to 128 rows of A are the narrow one. The `splits` blocks of a cluster share 64 columns, each has a part
// of K, see cluster_sum.cuh. How a row's result is summed up does not depend on m.
//
// In:   a_map     boxes of `width` rows: 8, 16, 32, 64 or 128, the least that hold m, or 128
//       b_map     boxes of 64 rows
//       a_scales  float32, rows contiguous, (row, k block) at row + k * a_scale_k_stride; b_scales  [N / 128, K / 128]
// Out:  d         bfloat16 [m, N]
//
// Grid: clusters of `splits` blocks, at most K / 128, by tiles of `width` rows; a multiprocessor has room for BLOCKS of
// them, 1 or 2. ceil(N / 64) clusters; but any number where `splits` is 1 and `width` below 128, as a block then goes
// on to columns that no other has. Launched early it loads weights beside the kernel that quantizes A.
#include "cluster_sum.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

constexpr int kBlockN = 64, kBlockK = 128;
constexpr int kMathWarps = 4;
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1, kWarps = kTokenWarp + 1;
static_assert(kWarps * kWarp == THREADS, "plan.py has the same roles");
constexpr int kFullArrivals = 3;  // who announces weights, who announces tokens, who copies the weights' scale

// Where everything is in shared memory; tiles are at multiples of 1024 bytes, which their swizzle needs.
template <int kTokens>
struct SharedMemory {
    static constexpr u32 kBytesWeights = kBlockN * kBlockK, kBytesTokens = kTokens * kBlockK;
    static constexpr u32 kBytesScales = kTokens * 4, kBytesParts = ClusterSum<kTokens, kBlockN>::kBytes;
    static constexpr u32 kBytesStage = kBytesWeights + kBytesTokens + kBytesScales + 4 + 2 * 8;
    static constexpr int kStages = (SMEM_BYTES - kBytesParts - 8) / kBytesStage;
    static constexpr u32 kTokenTiles = kStages * kBytesWeights, kParts = kTokenTiles + kStages * kBytesTokens;
    static constexpr u32 kScales = kParts + kBytesParts, kFull = kScales + kStages * kBytesScales;
    static constexpr u32 kEmpty = kFull + kStages * 8, kReceived = kEmpty + kStages * 8;
    static constexpr u32 kWeightScales = kReceived + 8;
    static_assert(kWeightScales + kStages * 4 <= SMEM_BYTES, "as many stages as there is room for");

    u32 base;
    DEVICE u32 weights(int stage) const { return base + stage * kBytesWeights; }
    DEVICE u32 tokens(int stage) const { return base + kTokenTiles + stage * kBytesTokens; }
    DEVICE u32 token_scale(int stage, int token) const { return base + kScales + stage * kBytesScales + token * 4; }
    DEVICE u32 weight_scale(int stage) const { return base + kWeightScales + stage * 4; }
    DEVICE u32 parts() const { return base + kParts; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival a math warp
    DEVICE u32 received() const { return base + kReceived; }
};

struct Operands {
    const TensorMap *tokens, *weights;
    const float *token_scales, *weight_scales;
    int token_scale_k_stride, m, n, k_blocks;
};

// What a block has of the work: its rows, its first columns, and of K the steps of 128 from `first` on.
template <int kTokens>
struct Share {
    int row, rows, split, column, first, steps;

    DEVICE Share(const Operands& in, int splits) {
        row = blockIdx.y * kTokens;
        rows = min(kTokens, in.m - row);
        split = blockIdx.x % splits;
        column = blockIdx.x / splits * kBlockN;
        first = split * in.k_blocks / splits;
        steps = (split + 1) * in.k_blocks / splits - first;
    }
    // The columns after these; there are none with 128 tokens, whose sums leave no registers for that.
    DEVICE int next(int column, int n) const { return kTokens < 128 ? column + gridDim.x * kBlockN : n; }
};

// ---- producers: a thread each ---------------------------------------------------------------------------------------

template <int kTokens>
DEVICE void load_weights(SharedMemory<kTokens> shared, const Operands& in, const Share<kTokens>& share) {
    Ring<SharedMemory<kTokens>::kStages> ring;
#pragma unroll 1
    for (int column = share.column; column < in.n; column = share.next(column, in.n)) {
        const float* scales = in.weight_scales + column / 128 * in.k_blocks;
#pragma unroll 1
        for (int k = share.first; k < share.first + share.steps; ++k, ring.advance()) {
            u32 full = shared.full(ring.stage);
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            barrier_arrive_expect(full, shared.kBytesWeights);
            tma_load(shared.weights(ring.stage), in.weights, full, k * kBlockK, column);
            copy_async_4(shared.weight_scale(ring.stage), scales + k);
            copy_async_arrive(full);
        }
    }
    copy_async_wait();  // PTX promises no arrivals of threads that have exited
}

template <int kTokens>
DEVICE void load_tokens(SharedMemory<kTokens> shared, const Operands& in, const Share<kTokens>& share) {
    wait_for_previous_kernel();
    fence_proxy_async_global();
    const float* scales = in.token_scales + share.row;
    u32 scale_bytes = (share.rows + 3) / 4 * 16;
    Ring<SharedMemory<kTokens>::kStages> ring;
#pragma unroll 1
    for (int column = share.column; column < in.n; column = share.next(column, in.n))
#pragma unroll 1
        for (int k = share.first; k < share.first + share.steps; ++k, ring.advance()) {
            u32 full = shared.full(ring.stage);
            barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
            barrier_arrive_expect(full, shared.kBytesTokens + scale_bytes);
            tma_load(shared.tokens(ring.stage), in.tokens, full, k * kBlockK, share.row);
            bulk_load(shared.token_scale(ring.stage, 0), scales + i64(k) * in.token_scale_k_stride, full, scale_bytes);
        }
}

// ---- math -----------------------------------------------------------------------------------------------------------

// A thread holds sums as ClusterSum has them.
template <int kTokens, int kStages>
DEVICE void multiply(SharedMemory<kTokens> shared, Ring<kStages>& ring, int steps, float (&sum)[kTokens / 2]) {
    int token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;
    for (int step = 0; step < steps; ++step, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        float product[kTokens / 2], scale[kTokens / 4], weight_scale = load_shared_float(shared.weight_scale(s));
        wgmma_fence();
        wgmma_issue(product, shared.weights(s), shared.tokens(s));
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i)
            scale[i] = load_shared_float(shared.token_scale(s, token + i / 2 * 8 + i % 2)) * weight_scale;
        wgmma_wait();
        wgmma_results_ready(product);
        __syncwarp();
        if (lane_of_warp() == 0) barrier_arrive(shared.empty(s));
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] += scale[i / 4 * 2 + i % 2] * product[i];
    }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kTokens>
DEVICE void run(const Operands& in, u16* d, int splits) {
    SharedMemory<kTokens> shared{dynamic_shared_address()};
    const Share<kTokens> share(in, splits);
    using Cluster = ClusterSum<kTokens, kBlockN>;
    static_assert(Cluster::kMathThreads == kMathWarps * kWarp, "who sends and stores");
    const Cluster cluster{shared.parts(), shared.received(), splits, share.split, share.rows};
    if (threadIdx.x == 0) cluster.init();
    init_barriers(shared, shared.kStages, kFullArrivals, kMathWarps);
    cluster.arrive();
    int warp = warp_uniform(threadIdx.x / kWarp);
    if (warp >= kMathWarps) {
        if (lane_of_warp() == 0) {
            if (warp == kWeightWarp)
                load_weights(shared, in, share);
            else
                load_tokens(shared, in, share);
        }
        __syncwarp();
        cluster.wait();
    } else {
        cluster.wait();  // the others' barriers are there
        Ring<SharedMemory<kTokens>::kStages> ring;
#pragma unroll 1
        for (int column = share.column; column < in.n; column = share.next(column, in.n)) {
            float sum[kTokens / 2];
            multiply(shared, ring, share.steps, sum);
            if (column > share.column) named_barrier(1, Cluster::kMathThreads);  // the tile before has been stored
            cluster.send(sum);
            cluster.store(d + i64(share.row) * in.n, in.n, column);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    dense_gemm_swap_ab(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                       const float* a_scales, int a_scale_k_stride, const float* b_scales, u16* d, int m, int n, int k,
                       int width, int splits) {
    let_next_kernel_start();
    const Operands in{&a_map, &b_map, a_scales, b_scales, a_scale_k_stride, m, n, k / kBlockK};
    switch (width) {
        case 8: run<8>(in, d, splits); break;
        case 16: run<16>(in, d, splits); break;
        case 32: run<32>(in, d, splits); break;
        case 64: run<64>(in, d, splits); break;
        default: run<128>(in, d, splits);
    }
}
