// D[m, N] = A[m, K] @ B[N, K]^T (+ bias) for few rows and few columns: the time goes into streaming the weights.
//
// Swap-AB: 64 columns of the result, rows of B, are the M operand of wgmma, and up to 32 rows of A the N operand. The
// `splits` thread blocks of a cluster share 64 columns; each has a part of K, see cluster_sum.cuh. The order in which a
// row's products are summed does not depend on m.
//
// In:   a_map     boxes of `tile_m` rows: 8, 16 or 32, the smallest that holds m
//       b_map     boxes of 64 rows
//       a_scales  float32, rows contiguous, (row, k block) at row + k * a_scale_k_stride; b_scales  [N / 128, K / 128]
//       bias      BIAS: bfloat16 [N], added to the sums of the first split
// Out:  d         bfloat16 [m, N]
//
// Grid: ceil(N / 64) clusters of `splits` thread blocks, at most K / 128. With PDL it loads weights while the previous
// kernel quantizes A.
#include "formats/row_scales.cuh"
#include "mma/swap_ab.cuh"
#include "pipeline/cluster_sum.cuh"
#include "pipeline/producer.cuh"

constexpr int kBlockN = DENSE_FEW_ROWS_TILE_N, kBlockK = 128;
constexpr int kMathWarps = 4;
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1, kWarps = kTokenWarp + 1;
static_assert(kWarps * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kFullArrivals = 3;  // the bytes of weights, the bytes of tokens, the copied weight scale

template <int kTokens>
using SharedMemory =
    Stages<kAsManyAsFit, Weights<kBlockN>, Tokens<kTokens>, Parts<ClusterSum<kTokens, kBlockN>::kBytes>,
           TokenScales<kTokens>, Full<1>, Empty<1>, Received<1>, WeightScales<1>>;

struct Operands {
    const TensorMap *tokens, *weights;
    const float* token_scales;
    const WeightScale* weight_scales;
    const u16* bias;
    int token_scale_k_stride, m, n, k_blocks;
};

// A thread block's share of the work: its columns, and `steps` K blocks from `first` on.
struct Share {
    int split, column, first, steps;

    DEVICE Share(const Operands& in, int splits) {
        split = blockIdx.x % splits;
        column = blockIdx.x / splits * kBlockN;
        first = split * in.k_blocks / splits;
        steps = (split + 1) * in.k_blocks / splits - first;
    }
};

// ---- producers: one thread each ------------------------------------------------------------------------------------

template <int kTokens>
DEVICE void load_weights(SharedMemory<kTokens> shared, const Operands& in, const Share& share) {
    const WeightScale* scales = in.weight_scales + share.column / 128 * in.k_blocks;
    Ring<SharedMemory<kTokens>::kStages> ring;
    fill_stages<barrier_wait>(shared, ring, share.first, share.first + share.steps, [&](int k, int s, u32 full) {
        const WeightTile to(shared, s);
        barrier_arrive_expect(full, to.kBytes);
        to.load(0, in.weights, full, k, share.column);
        to.load_scale(0, scales + k);
        copy_async_arrive(full);
    });
    finish_copies();
}

template <int kTokens>
DEVICE void load_tokens(SharedMemory<kTokens> shared, const Operands& in, const Share& share) {
    wait_for_previous_kernel();
    fence_proxy_async_global();
    u32 scale_bytes = (in.m + 3) / 4 * 16;
    Ring<SharedMemory<kTokens>::kStages> ring;
    fill_stages<barrier_wait>(shared, ring, share.first, share.first + share.steps, [&](int k, int s, u32 full) {
        barrier_arrive_expect(full, SharedMemory<kTokens>::template kBytes<Tokens> + scale_bytes);
        tma_load(shared.tokens(s, 0), in.tokens, full, k * kBlockK, 0);
        bulk_load(shared.token_scale(s, 0), in.token_scales + i64(k) * in.token_scale_k_stride, full, scale_bytes);
    });
}

// ---- kernel --------------------------------------------------------------------------------------------------------

template <int kTokens>
DEVICE void multiply_columns(const Operands& in, u16* d, int splits) {
    SharedMemory<kTokens> shared{dynamic_shared_address()};
    const Share share(in, splits);
    using Cluster = ClusterSum<kTokens, kBlockN>;
    static_assert(Cluster::kMathThreads == kMathWarps * kWarp, "who sends and stores");
    const Cluster cluster{shared.parts(), shared.received(0), splits, share.split, in.m};
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
        const auto weight_row = [&](int i) {
            return min(share.column + int(warp_row(threadIdx.x) + lane_row(threadIdx.x)) + row_offset(i), in.n - 1);
        };
        const RowScales<2> scales(in.weight_scales, weight_row);
        const bool adds_bias = kBias && share.split == 0;
        float biases[2];
        if (adds_bias)
            for (int i = 0; i < 2; ++i) biases[i] = bf16_value(in.bias[weight_row(i)]);
        cluster.wait();  // the other blocks have initialized their barriers
        Fragment<kTokens> sum[1];
        Ring<SharedMemory<kTokens>::kStages> ring;
        multiply_stages<kTokens>(shared, ring, share.steps, 0, 0, sum);
        scales.scale(sum);  // each split: the threads that add them up have other rows
        if (adds_bias)
            for (int e = 0; e < kTokens / 2; ++e) sum[0][e] += biases[row_index(e)];
        cluster.send(sum[0]);
        cluster.store(d, in.n, share.column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_gemm_few_rows(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                        const float* a_scales, int a_scale_k_stride, const WeightScale* b_scales, u16* d, int m, int n,
                        int k, int tile_m, int splits, const u16* bias) {
    let_next_kernel_start();
    const Operands in{&a_map, &b_map, a_scales, b_scales, bias, a_scale_k_stride, m, n, k / kBlockK};
    switch (tile_m) {
        case 8: multiply_columns<8>(in, d, splits); break;
        case 16: multiply_columns<16>(in, d, splits); break;
        default: multiply_columns<32>(in, d, splits);
    }
}
