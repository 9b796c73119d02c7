// D[rows, N] = A[rows, K] @ B[expert, N, K]^T as grouped_gemm.cu, for few rows an expert: weights are streamed once.
//
// Swap-AB: 128 rows of weights are the 64-row operands of the two math warpgroups, the tokens are the narrow one. A
// tile is 128 weight rows by up to 64 tokens, multiplied 8, 16, 32 or 64 tokens wide, by the expert's own count.
#include "ptx.cuh"
#include "tile_queue.cuh"
#include "transposed.cuh"
#include "wgmma.cuh"

constexpr int kStages = STAGES;
constexpr int kBlockTokens = 64, kBlockN = 128, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kWarpgroupN = kBlockN / kMathWarpgroups;
constexpr int kThreads = 128 * (kMathWarpgroups + 1);
static_assert(kThreads == THREADS, "plan.py has the same roles");
constexpr int kFullArrivals = 2;  // of a stage: the bytes of bulk copies are announced; the small copies have landed
constexpr int kBoxTokens = 8;  // of one TMA load: one swizzle atom, so that boxes stack

// Where everything is in shared memory; tiles are at multiples of 1024 bytes, which their swizzle needs.
struct SharedMemory {
    static constexpr u32 kBytesWeights = kBlockN * kBlockK, kBytesTokens = kBlockTokens * kBlockK;
    static constexpr u32 kBytesStaging = kBlockTokens * kWarpgroupN * 2;
    static constexpr u32 kTokens = kStages * kBytesWeights, kStaging = kTokens + kStages * kBytesTokens;
    static constexpr u32 kTokenScales = kStaging + kMathWarpgroups * kBytesStaging;
    static constexpr u32 kBytesTokenScales = (kBlockTokens + ActivationScales::kSlack) * 4;
    static constexpr u32 kWeightScale = kTokenScales + kStages * kBytesTokenScales;
    static constexpr u32 kTiles = (kWeightScale + kStages * 4 + 15) / 16 * 16;
    static constexpr u32 kFull = kTiles + kStages * 16, kEmpty = kFull + kStages * 8;
    static constexpr u32 kEnd = kEmpty + kStages * 8;

    u32 base;
    DEVICE u32 weights(int stage, int warpgroup) const {
        return base + stage * kBytesWeights + warpgroup * kWarpgroupN * kBlockK;
    }
    DEVICE u32 tokens(int stage, int token) const { return base + kTokens + stage * kBytesTokens + token * kBlockK; }
    DEVICE u32 staging(int warpgroup) const { return base + kStaging + warpgroup * kBytesStaging; }
    DEVICE u32 token_scale(int stage, int token) const {
        return base + kTokenScales + stage * kBytesTokenScales + token * 4;
    }
    DEVICE u32 weight_scale(int stage) const { return base + kWeightScale + stage * 4; }
    DEVICE u32 tile(int stage) const { return base + kTiles + stage * 16; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival a math warp
};
static_assert(SharedMemory::kEnd <= SMEM_BYTES && SMEM_BYTES - SharedMemory::kEnd < 1024, "as in plan.py");

using Queue = TileQueue<kBlockTokens>;

struct Operands {
    const TensorMap *tokens, *weights;
    ActivationScales token_scales;
    const float* weight_scales;  // [experts, ceil(N / 128), K / 128]
    int n, k_blocks;
};

// ---- producer --------------------------------------------------------------------------------------------------

// What a step of a tile loads.
struct TileLoads {
    Tile tile;
    int boxes, weight_row;
    const float *weight_scale, *token_scale;
    u32 scale_bytes, bytes;

    DEVICE TileLoads(const Operands& in, const Tile& tile) : tile(tile) {
        boxes = width_of(tile.rows) / kBoxTokens;
        weight_row = tile.expert * in.n + tile.column * kBlockN;
        weight_scale = in.weight_scales + i64(tile.expert * ((in.n + kBlockN - 1) / kBlockN) + tile.column) * in.k_blocks;
        token_scale = in.token_scales.of_tile(tile);
        scale_bytes = ActivationScales::bytes(tile);
        bytes = SharedMemory::kBytesWeights + boxes * kBoxTokens * kBlockK + scale_bytes;
    }
    DEVICE void weights(SharedMemory shared, int s, const Operands& in, int k) const {
        barrier_arrive_expect(shared.full(s), bytes);
        tma_load(shared.weights(s, 0), in.weights, shared.full(s), k * kBlockK, weight_row);
        copy_async_4(shared.weight_scale(s), weight_scale + k);
    }
    DEVICE void tokens(SharedMemory shared, int s, const Operands& in, int k) const {
        if (k == 0) publish_tile(shared.tile(s), tile);
        for (int box = 0; box < boxes; ++box)
            tma_load(shared.tokens(s, box * kBoxTokens), in.tokens, shared.full(s), k * kBlockK,
                     tile.row + box * kBoxTokens);
        bulk_load(shared.token_scale(s, 0), token_scale + k * in.token_scales.k_stride, shared.full(s), scale_bytes);
        copy_async_arrive(shared.full(s));
    }
};

// Weights of the first steps, which do not depend on the kernel before; returns of how many.
DEVICE int load_weights_ahead(SharedMemory shared, const Operands& in, Queue queue) {
    Ring<kStages> ring;
    int steps = 0, of_tile = queue.counters ? in.k_blocks - Queue::kClaimAhead : in.k_blocks;
    while (steps < kStages && queue.index < queue.total) {
        const TileLoads loads(in, queue.tile());
        for (int k = 0; k < of_tile && steps < kStages; ++k, ++steps, ring.advance()) {
            if (threadIdx.x % 32 == 0) loads.weights(shared, ring.stage, in, k);
            if (!queue.counters) queue.step(k);
        }
        if (queue.counters) break;
    }
    return steps;
}

DEVICE void load_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, Queue& queue, int& ahead) {
    const TileLoads loads(in, queue.tile());
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            if (ahead <= 0) loads.weights(shared, s, in, k);
            loads.tokens(shared, s, in, k);
        }
        --ahead;
        queue.step(k);
    }
}

// ---- math ------------------------------------------------------------------------------------------------------

// A thread holds weight rows lane/4 and lane/4 + 8 of its warp's 16, tokens 8i + lane%4*2 and the next.
template <int kTokens>
DEVICE void multiply_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Tile& tile, int warpgroup,
                          float (&sum)[kTokens / 2]) {
    int lane = threadIdx.x % 32, token = ActivationScales::offset(tile.row) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;

    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        float weight_scale = load_shared_float(shared.weight_scale(s)), scale[kTokens / 4];
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i)
            scale[i] = load_shared_float(shared.token_scale(s, token + i / 2 * 8 + i % 2)) * weight_scale;
        float product[kTokens / 2];
        wgmma_k128(product, shared.weights(s, warpgroup), shared.tokens(s, 0));
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(s));
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] += scale[i / 4 * 2 + i % 2] * product[i];
    }
}

template <int kTokens>
DEVICE void compute_tile(SharedMemory shared, Ring<kStages>& ring, u16* d, int n, int k_blocks, const Tile& tile,
                         int warpgroup) {
    float sum[kTokens / 2];
    multiply_tile<kTokens>(shared, ring, k_blocks, tile, warpgroup, sum);
    store_transposed<kTokens>(shared.staging(warpgroup), warpgroup, d, n, tile.row, tile.rows,
                              tile.column * kBlockN + warpgroup * kWarpgroupN, sum);
}

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_swap_ab(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const float* a_scales, int a_scale_expert_stride, int a_scale_k_stride, const float* b_scales,
                          u16* d, const int4* table, int* num_tiles, int m, int n, int k, int pair_of_counters) {
    let_next_kernel_start();
    SharedMemory shared{dynamic_shared_address()};
    init_barriers(shared, kStages, kFullArrivals, 4 * kMathWarpgroups);

    int warpgroup = warp_uniform(threadIdx.x / 128);
    Operands in{&a_map, &b_map, {a_scales, a_scale_expert_stride, a_scale_k_stride}, b_scales, n, k / kBlockK};
    Ring<kStages> ring;
    if (warpgroup == kMathWarpgroups) {
        if (threadIdx.x / 32 == 4 * kMathWarpgroups) {
            Queue queue(table, num_tiles, pair_of_counters, m, (n + kBlockN - 1) / kBlockN, in.k_blocks);
            int ahead = load_weights_ahead(shared, in, queue);
            wait_for_previous_kernel();
            while (queue.index < queue.total) load_tile(shared, ring, in, queue, ahead);
            load_end(shared, ring, kFullArrivals);
            queue.finish();
        }
    } else {
        while (true) {
            barrier_wait(shared.full(ring.stage), ring.phase);
            Tile tile = published_tile(shared.tile(ring.stage));
            if (tile.rows == 0) break;
            switch (width_of(tile.rows)) {
                case 8: compute_tile<8>(shared, ring, d, n, in.k_blocks, tile, warpgroup); break;
                case 16: compute_tile<16>(shared, ring, d, n, in.k_blocks, tile, warpgroup); break;
                case 32: compute_tile<32>(shared, ring, d, n, in.k_blocks, tile, warpgroup); break;
                default: compute_tile<64>(shared, ring, d, n, in.k_blocks, tile, warpgroup);
            }
        }
    }
}
