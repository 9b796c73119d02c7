// D[rows, N] = A[rows, K] @ B[expert, N, K]^T as grouped_gemm.cu, for few rows an expert: the weights are streamed once.
//
// Swap-AB: 128 rows of weights are the 64-row operands of the two math warpgroups, the tokens are the narrow one. A tile
// is 128 weight rows by up to 64 tokens, multiplied 8, 16, 32 or 64 tokens wide, by the expert's own count. The result
// stands transposed in the registers and is turned round in shared memory on its way out.
#include "ptx.cuh"
#include "tile_walk.cuh"
#include "wgmma.cuh"

constexpr int kStages = STAGES;
constexpr int kBlockTokens = 64, kBlockN = 128, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kWeightsPerWarpgroup = kBlockN / kMathWarpgroups;
constexpr int kThreads = 128 * (kMathWarpgroups + 1);
constexpr int kBoxTokens = 8;  // of one TMA load: one swizzle atom, so that boxes stack

struct Shared {
    alignas(1024) u8 weights[kStages][kBlockN][kBlockK];
    alignas(1024) u8 tokens[kStages][kBlockTokens][kBlockK];
    alignas(1024) u16 staging[kMathWarpgroups][kBlockTokens][kWeightsPerWarpgroup];
    float token_scales[kStages][kBlockTokens];
    float weight_scale[kStages];
    u64 full[kStages];   // filled: one arrival for the bytes of TMA, one a lane for its scales
    u64 empty[kStages];  // read: one arrival a math warp
};
static_assert(sizeof(Shared) == SMEM_BYTES, "plan.py computes the same layout");

struct Operands {
    const TensorMap *tokens, *weights;
    ActivationScales token_scales;
    const float* weight_scales;  // [experts, ceil(N / 128), K / 128]
    int n, k_blocks;
};

// How many tokens wide `rows` rows are multiplied.
DEVICE int width_of(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }

// ---- producer --------------------------------------------------------------------------------------------------

DEVICE void load_tile(Shared& shared, Ring<kStages>& ring, const Operands& in, const Tile& tile) {
    int lane = threadIdx.x % 32, boxes = width_of(tile.rows) / kBoxTokens;
    int scale_rows = (in.n + kBlockN - 1) / kBlockN;
    const float* weight_scale = in.weight_scales + i64(tile.expert * scale_rows + tile.column) * in.k_blocks;
    const float* token_scale = in.token_scales.of_row(tile.expert, tile.row + lane);
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(&shared.empty[s], ring.phase ^ 1);
        if (lane == 0) {
            barrier_arrive_expect(&shared.full[s], (kBlockN + boxes * kBoxTokens) * kBlockK);
            tma_load(shared.weights[s], in.weights, &shared.full[s], k * kBlockK, tile.expert * in.n + tile.column * kBlockN);
            for (int box = 0; box < boxes; ++box)
                tma_load(shared.tokens[s][box * kBoxTokens], in.tokens, &shared.full[s], k * kBlockK,
                         tile.row + box * kBoxTokens);
            copy_async_4(&shared.weight_scale[s], weight_scale + k);
        }
#pragma unroll
        for (int row = 0; row < kBlockTokens; row += 32)
            if (row + lane < tile.rows)
                copy_async_4(&shared.token_scales[s][row + lane], token_scale + i64(row) * in.token_scales.row_stride);
        token_scale += in.token_scales.k_stride;
        copy_async_arrive(&shared.full[s]);
    }
}

// ---- math ------------------------------------------------------------------------------------------------------

// A thread holds weight rows lane/4 and lane/4 + 8 of its warp's 16, tokens 8i + lane%4*2 and the next.
template <int kTokens>
DEVICE void multiply_tile(Shared& shared, Ring<kStages>& ring, int k_blocks, int warpgroup, float (&sum)[kTokens / 2]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;

    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(&shared.full[s], ring.phase);
        float weight_scale = shared.weight_scale[s], scale[kTokens / 4];
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i)
            scale[i] = shared.token_scales[s][i / 2 * 8 + lane % 4 * 2 + i % 2] * weight_scale;
        float product[kTokens / 2];
        wgmma_k128(product, shared.weights[s][warpgroup * kWeightsPerWarpgroup], shared.tokens[s]);
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.empty[s]);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] += scale[i / 4 * 2 + i % 2] * product[i];
    }
}

// ---- epilogue: tokens by 64 weight rows of one warpgroup ---------------------------------------------------------

template <int kTokens>
DEVICE void store_tile(Shared& shared, u16* d, int n, const Tile& tile, int warpgroup, const float (&sum)[kTokens / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    auto chunk_at = [&](int token, int chunk) {  // 8 weight rows of a token, 16 bytes, swizzled
        return shared_address(&shared.staging[warpgroup][token][(chunk ^ token % 8) * 8]);
    };
    named_barrier(1 + warpgroup, 128);  // the staging buffer is free
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i)
        store_matrix_x2_transposed(chunk_at(i * 8 + lane % 8, warp * 2 + lane / 8 % 2), pack_bf16(sum[4 * i], sum[4 * i + 1]),
                                   pack_bf16(sum[4 * i + 2], sum[4 * i + 3]));
    named_barrier(1 + warpgroup, 128);  // the staging buffer is full
    constexpr int kChunks = kWeightsPerWarpgroup / 8;
    int column = tile.column * kBlockN + warpgroup * kWeightsPerWarpgroup;
    for (int i = threadIdx.x % 128; i < tile.rows * kChunks; i += 128) {
        int token = i / kChunks, chunk = i % kChunks;
        if (column + chunk * 8 < n)
            *reinterpret_cast<uint4*>(d + i64(tile.row + token) * n + column + chunk * 8) =
                load_shared_16(chunk_at(token, chunk));
    }
}

template <int kTokens>
DEVICE void compute_tile(Shared& shared, Ring<kStages>& ring, u16* d, int n, int k_blocks, const Tile& tile, int warpgroup) {
    float sum[kTokens / 2];
    multiply_tile<kTokens>(shared, ring, k_blocks, warpgroup, sum);
    store_tile<kTokens>(shared, d, n, tile, warpgroup, sum);
}

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_swap_ab(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const float* a_scales, int a_scale_expert_stride, int a_scale_row_stride, int a_scale_k_stride,
                         const float* b_scales, u16* d, const int4* table, const int* num_tiles, int m, int n, int k) {
    extern __shared__ u8 dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(&shared.full[s], 1 + 32);
            barrier_init(&shared.empty[s], 4 * kMathWarpgroups);
        }
        barrier_init_fence();
    }
    __syncthreads();

    int warpgroup = threadIdx.x / 128;
    Operands in{&a_map, &b_map, {a_scales, a_scale_expert_stride, a_scale_row_stride, a_scale_k_stride}, b_scales, n,
                k / kBlockK};
    TileWalk<kBlockTokens> walk(table, num_tiles, m, (n + kBlockN - 1) / kBlockN);
    Ring<kStages> ring;
    Tile tile;
    if (warpgroup == kMathWarpgroups) {
        if (threadIdx.x / 32 == 4 * kMathWarpgroups)
            while (walk.advance(tile)) load_tile(shared, ring, in, tile);
    } else {
        while (walk.advance(tile)) {
            switch (width_of(tile.rows)) {
                case 8: compute_tile<8>(shared, ring, d, n, in.k_blocks, tile, warpgroup); break;
                case 16: compute_tile<16>(shared, ring, d, n, in.k_blocks, tile, warpgroup); break;
                case 32: compute_tile<32>(shared, ring, d, n, in.k_blocks, tile, warpgroup); break;
                default: compute_tile<64>(shared, ring, d, n, in.k_blocks, tile, warpgroup);
            }
        }
    }
}
