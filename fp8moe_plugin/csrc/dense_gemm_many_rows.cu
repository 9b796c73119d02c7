// D[m, N] = A[m, K] @ B[N, K]^T (+ bias), e4m3 with scales per 1x128 of A and 128x128 of B, for many rows.
//
// A tile is 128 rows, 64 per math warpgroup, by TILE_N columns, over all of K. The two thread blocks of a cluster
// compute two row tiles of the same columns: each loads half of the weights, to the shared memory of both. One producer
// thread fills the stages of a ring, each a K block of 128, with weights, another one with tokens. The product of a K
// block lands in one accumulator and is scaled and added to another in float32 before the next (DeepGEMM's two-level
// accumulation); 256 columns are two products, one after the other.
//
// In:   a_map     boxes of 128 rows of A;    b_map  boxes of TILE_N / CLUSTER rows of weights
//       a_scales  float32, rows contiguous, (row, k block) at row + k * a_scale_k_stride; b_scales  [N / 128, K / 128]
//       bias      BIAS: bfloat16 [N], added to the sums
// Out:  d         bfloat16 [m, N];    d_map  the same in boxes of 64 rows by 64 columns
//
// Grid: a multiple of CLUSTER thread blocks, at most one per SM; each cluster computes every n-th pair of tiles. It may
// be launched early (PDL), but loads nothing before the previous kernel has ended: blocks that read the same operands
// have to stay in lockstep.
#include "device/wgmma.cuh"
#include "epilogue/dense_bias.cuh"
#include "pipeline/paired_tiles.cuh"
#include "pipeline/producer.cuh"

constexpr int kBlockM = 128, kBlockK = 128, kWarpgroupM = 64, kStoreN = 64;
constexpr int kMathWarpgroups = kBlockM / kWarpgroupM, kMathWarps = 4 * kMathWarpgroups;
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1;  // of a warpgroup without other roles
using Tiles = PairedTiles<kBlockM, TILE_N, CLUSTER>;
static_assert((kMathWarps + 4) * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // on average the launch's 168 per thread
constexpr int kFullArrivals = 3;  // the bytes of weights, the bytes of tokens, the copied weight scales

constexpr int kHalves = TILE_N > 192 ? 2 : 1, kHalfN = TILE_N / kHalves;  // as wide as the registers allow
// A tile begins at a multiple of kColumnStep in a scale block of 128 columns, of which it has up to kScaleBlocks.
constexpr int kColumnStep = kScalesOfRows ? TILE_N : (TILE_N & -TILE_N) < 128 ? TILE_N & -TILE_N : 128;
constexpr int kScaleBlocks = kScalesOfRows ? 1 : (128 - kColumnStep + TILE_N + 127) / 128;
constexpr int kWholeParts = TILE_N / kStoreN, kParts = ceil_div(TILE_N, kStoreN);  // of a tile of the result
constexpr int kUnroll = kColumnStep < 64 ? 2 : 4;  // with fewer instances of the main loop, more

using SharedMemory =
    Stages<kAsManyAsFit, Weights<TILE_N>, Tokens<kBlockM>, Staging<kMathWarpgroups * kParts * kWarpgroupM>,
           TokenScales<kBlockM>, Full<1>, Empty<1>, WeightScales<kScaleBlocks>,
           StagedRowScales<kMathWarpgroups * TILE_N>, StagedDenseBias<kMathWarpgroups * TILE_N>>;
constexpr int kStages = SharedMemory::kStages;
using Sums = Fragment<kHalfN>[kHalves];

struct Operands {
    const TensorMap *tokens, *weights;
    const float* token_scales;
    const WeightScale* weight_scales;
    const u16* bias;
    int token_scale_k_stride, m, n, k_blocks;
};

struct Result {
    const TensorMap* map;
    u16* d;
    int n;
};

// ---- producers: one thread each ------------------------------------------------------------------------------------

DEVICE void load_weights(SharedMemory shared, const Operands& in) {
    wait_for_previous_kernel();
    constexpr int kShare = TILE_N / CLUSTER;
    int rank = blockIdx.x % CLUSTER, last_block = (in.n - 1) / 128;
    Ring<kStages> ring;
    for (Tiles tiles(in.m, in.n, in.k_blocks); tiles.more(); tiles.advance()) {
        int block = tiles.column / 128;
        const WeightScale* scales = in.weight_scales + block * in.k_blocks;
        int next = block < last_block ? in.k_blocks : 0;  // a tile may pass N
        int offsets[] = {0, next, block + 1 < last_block ? 2 * in.k_blocks : next};
        fill_stages<barrier_wait>(shared, ring, 0, in.k_blocks, [&](int k, int s, u32 full) {
            const WeightTile to(shared, s);
            barrier_arrive_expect(full, to.kBytes);
            to.load_to_cluster(rank * kShare, in.weights, full, k, tiles.column + rank * kShare, (1 << CLUSTER) - 1);
#pragma unroll
            for (int i = 0; i < kScaleBlocks; ++i) to.load_scale(i, scales + offsets[i] + k);
            copy_async_arrive(full);
        });
    }
    finish_copies();
    // Until the other block has released all stages it writes to barriers of this one, which must not end before.
    for (int s = 0; s < kStages; ++s, ring.advance()) barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
}

DEVICE void load_tokens(SharedMemory shared, const Operands& in) {
    wait_for_previous_kernel();
    fence_proxy_async_global();
    Ring<kStages> ring;
    for (Tiles tiles(in.m, in.n, in.k_blocks); tiles.more(); tiles.advance()) {
        int rows = tiles.rows();
        const float* scales = in.token_scales + tiles.row;
        u32 scale_bytes = ceil_div(rows, 4) * 16;
        fill_stages<barrier_wait>(shared, ring, 0, in.k_blocks, [&](int k, int s, u32 full) {
            if (rows <= 0) {
                barrier_arrive(full);
                return;
            }
            barrier_arrive_expect(full, SharedMemory::kBytes<Tokens> + scale_bytes);
            tma_load(shared.tokens(s, 0), in.tokens, full, k * kBlockK, tiles.row);
            bulk_load(shared.token_scale(s, 0), scales, full, scale_bytes);
            scales += in.token_scale_k_stride;
        });
    }
}

// ---- math ----------------------------------------------------------------------------------------------------------

// By each math warp, when it has consumed a stage: lane i tells block i of the cluster.
DEVICE void release_in_cluster(u32 empty, int stage) {
    __syncwarp();
    if (lane_of_warp() < CLUSTER) barrier_arrive_in_cluster(empty + stage * 8);
}

// The addresses of a thread's operands in the first stage, as the main loop needs them: it adds multiples of a stage.
struct First {
    u32 tokens, weights;  // low words of descriptors
    u32 token_scales, empty;

    DEVICE First(SharedMemory shared, int warpgroup) {
        int rows = warpgroup * kWarpgroupM, row = rows + warp_row(threadIdx.x) + lane_row(threadIdx.x);
        tokens = wgmma_descriptor_low(shared.tokens(0, rows)),
        weights = wgmma_descriptor_low(WeightTile(shared, 0).operand(0));
        token_scales = shared.token_scale(0, row);
        empty = in_block(shared.empty(0), lane_of_warp() % CLUSTER);
        asm volatile("" : "+r"(token_scales), "+r"(empty));  // the compiler would compute them in each step
    }
};

// The product of a warpgroup's rows and half of a tile's columns.
DEVICE void start_product(Fragment<kHalfN>& product, const First& first, int stage, int half) {
    constexpr u32 kHalf = kHalfN * kBlockK / 16, kTokens = SharedMemory::kBytes<Tokens> / 16,
                  kWeights = WeightTile<SharedMemory>::kBytes / 16;  // in descriptors
    u32 a = first.tokens + stage * kTokens, b = first.weights + stage * kWeights + half * kHalf;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * kDescriptorStepK; step += kDescriptorStepK)
        wgmma(product, wgmma_descriptor(a + step), wgmma_descriptor(b + step), step > 0);
    wgmma_commit();
}

// The first block of scales ends before column kBoundary of the tile.
template <int kBoundary>
DEVICE void multiply(SharedMemory shared, Ring<kStages>& ring, const First& first, int k_blocks, Sums& sum) {
    clear(sum);
    bool ready = false;  // whether the next stage is known to be full
#pragma unroll kUnroll
    for (int k = 0; k < k_blocks; ++k) {
        int s = ring.stage;
        if (!ready) barrier_wait(shared.full(s), ring.phase);
        u32 token_scales = first.token_scales + s * SharedMemory::kBytes<TokenScales>;
        float of_row[2] = {load_shared_float(token_scales), load_shared_float(token_scales + 8 * 4)};
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            Fragment<kHalfN> product;
            start_product(product, first, s, half);
            float scale[kScaleBlocks][2];
#pragma unroll
            for (int block = 0; block < kScaleBlocks; ++block) {
                if (kScaleBlocks == kHalves && block != half) continue;
                float of_block = WeightTile(shared, s).scale(block);
                scale[block][0] = of_row[0] * of_block;
                scale[block][1] = of_row[1] * of_block;
            }
            wgmma_finish(product);
            if (half == kHalves - 1) {
                release_in_cluster(first.empty, s);
                ring.advance();
                ready = k + 1 < k_blocks && barrier_try_wait(shared.full(ring.stage), ring.phase);
            }
#pragma unroll
            for (int e = 0; e < kHalfN / 2; ++e) {
                int column = half * kHalfN + e / 4 * 8, block = column < kBoundary ? 0 : (column - kBoundary) / 128 + 1;
                sum[half][e] += scale[block][row_index(e)] * product[e];
            }
        }
    }
}

// For `boundary`, which the compiler must know, or it selects between scales in the inner loop.
template <int kBoundary>
DEVICE void multiply_from(SharedMemory shared, Ring<kStages>& ring, const First& first, int k_blocks, int boundary,
                          Sums& sum) {
    if constexpr (kBoundary >= 128)
        multiply<kBoundary>(shared, ring, first, k_blocks, sum);
    else if (boundary == kBoundary)
        multiply<kBoundary>(shared, ring, first, k_blocks, sum);
    else
        multiply_from<kBoundary + kColumnStep>(shared, ring, first, k_blocks, boundary, sum);
}

// Where a warpgroup stages a part of a tile, 64 rows of 64 columns.
DEVICE u32 part_at(SharedMemory shared, int warpgroup, int part) {
    return shared.staging((warpgroup * kParts + part) * kWarpgroupM);
}

// Stores the staged columns behind the whole parts, kChunks times 8: a box would reach into the next tile.
template <int kChunks>
DEVICE void store_rest(SharedMemory shared, const Result& out, int warpgroup, int row, int rows, int column) {
    for (int i = threadIdx.x % kWarpgroup; i < rows * kChunks; i += kWarpgroup) {
        int r = i / kChunks, chunk = i % kChunks, x = column + kWholeParts * kStoreN + chunk * 8;
        if (x < out.n)
            *reinterpret_cast<uint4*>(out.d + i64(row + r) * out.n + x) =
                load_shared_16(part_at(shared, warpgroup, kWholeParts) + r * 128 + (chunk ^ r % 8) * 16);
    }
}

// Stores by way of shared memory and TMA, which drops what lies outside of D.
DEVICE void store(SharedMemory shared, const Result& out, int warpgroup, int row, int rows, int column,
                  const Sums& sum) {
    bool elected = threadIdx.x % kWarpgroup == 0;
    if (elected) tma_store_wait_read();
    warpgroup_barrier(warpgroup);  // the previous tile has been read
    int lane = lane_of_warp(), staged_row = warp_row(threadIdx.x) + lane % 16;
#pragma unroll
    for (int i = 0; i < TILE_N / 8; i += 2) {
        int chunk = i % 8 + lane / 16, e = i % (kHalfN / 8) * 4;  // 8 columns of a part, 16 bytes
        u32 to = part_at(shared, warpgroup, i / 8) + staged_row * 128 + (chunk ^ staged_row % 8) * 16;
        const Fragment<kHalfN>& of = sum[i / (kHalfN / 8)];
        store_matrix_x4(to, pack_bf16x2(of[e], of[e + 1]), pack_bf16x2(of[e + 2], of[e + 3]),
                        pack_bf16x2(of[e + 4], of[e + 5]), pack_bf16x2(of[e + 6], of[e + 7]));
    }
    fence_proxy_async();
    warpgroup_barrier(warpgroup);  // this tile is staged
    if (elected) {
#pragma unroll
        for (int part = 0; part < kWholeParts; ++part)
            if (column + part * kStoreN < out.n)
                tma_store(out.map, part_at(shared, warpgroup, part), column + part * kStoreN, row);
        tma_store_commit();
    }
    if constexpr (kWholeParts < kParts) store_rest<TILE_N % kStoreN / 8>(shared, out, warpgroup, row, rows, column);
}

DEVICE void multiply_tiles(SharedMemory shared, const Operands& in, const Result& out, int warpgroup) {
    const First first(shared, warpgroup);
    Ring<kStages> ring;
    for (Tiles tiles(in.m, in.n, in.k_blocks); tiles.more();) {
        int rows = tiles.rows() - warpgroup * kWarpgroupM, row = tiles.row + warpgroup * kWarpgroupM;
        int column = tiles.column;
        if (rows <= 0) {
            for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
                barrier_wait(shared.full(ring.stage), ring.phase);
                release_in_cluster(first.empty, ring.stage);
            }
            tiles.advance();
            continue;
        }
        Sums sum;
        int columns = min(TILE_N, in.n - column);
        u32 row_scales = shared.at<StagedRowScales>(warpgroup * TILE_N);
        u32 bias = shared.at<StagedDenseBias>(warpgroup * TILE_N / 2);
        copy_row_scales(row_scales, in.weight_scales + column, columns);
        copy_dense_bias(bias, in.bias + column, columns);
        multiply_from<kColumnStep>(shared, ring, first, in.k_blocks, 128 - column % 128, sum);
        tiles.advance();
        await_row_values(warpgroup);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            scale_columns(row_scales + half * kHalfN * 4, sum[half]);
            add_dense_bias(bias + half * kHalfN * 2, sum[half]);
        }
        store(shared, out, warpgroup, row, min(rows, kWarpgroupM), column, sum);
    }
    if (threadIdx.x % kWarpgroup == 0) tma_store_wait();
}

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    dense_gemm_many_rows(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                         const __grid_constant__ TensorMap d_map, const float* a_scales, int a_scale_k_stride,
                         const WeightScale* b_scales, u16* d, int m, int n, int k, const u16* bias) {
    const Operands in{&a_map, &b_map, a_scales, b_scales, bias, a_scale_k_stride, m, n, k / kBlockK};
    SharedMemory shared{dynamic_shared_address()};
    if (threadIdx.x == kMathWarps * kWarp) {
        prefetch(in.tokens);
        prefetch(in.weights);
        prefetch(&d_map);
    }
    init_barriers(shared, kStages, kFullArrivals, kMathWarps * CLUSTER);
    cluster_arrive();
    cluster_wait();  // the other block has initialized its barriers
    int warp = warp_uniform(threadIdx.x / kWarp);
    if (warp >= kMathWarps) {
        decrease_registers<kProducerRegisters>();
        if (lane_of_warp() != 0) return;
        if (warp == kWeightWarp) load_weights(shared, in);
        if (warp == kTokenWarp) load_tokens(shared, in);
        return;
    }
    increase_registers<kMathRegisters>();
    multiply_tiles(shared, in, {&d_map, d, n}, warp / 4);
}
