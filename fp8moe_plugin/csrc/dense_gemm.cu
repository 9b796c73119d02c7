// D[m, N] = A[m, K] @ B[N, K]^T (+ bias), e4m3 with scales per 1x128 of A and 128x128 of B.
//
// With up to a few hundred rows the GEMM takes as long as the SM that loads the most, with more rows as long as the SM
// that multiplies the most. A tile therefore has as many columns as give all SMs about the same work, even where such a
// tile spans two or three blocks of scales.
//
// A tile is BLOCK_M rows, 64 per math warpgroup, by `tile_n` columns, over all of K. One producer thread fills the
// stages of a ring, each a K block of 128, with weights, another one with tokens. The product of a K block lands in one
// accumulator and is scaled and added to another in float32 before the next (DeepGEMM's two-level accumulation).
//
// In:   a_map     boxes of BLOCK_M rows; a_tail_map  boxes of the last tile's rows, rounded up to 8: a K block takes
//                 longer if TMA fills in rows past the end, or loads several boxes
//       b_map     boxes of `tile_n` rows: 16, 32, 64, 96, 112, 128, 144, 160, 176 or 192
//       a_scales  float32, rows contiguous, (row, k block) at row + k * a_scale_k_stride; b_scales  [N / 128, K / 128]
//       bias      BIAS: bfloat16 [N], added to the sums
// Out:  d         bfloat16 [m, N]
//
// Grid: any number of thread blocks, one per SM; each computes every gridDim.x-th tile. With PDL it loads weights while
// the previous kernel quantizes A.
#include "device/wgmma.cuh"
#include "epilogue/dense_bias.cuh"
#include "pipeline/producer.cuh"

constexpr int kBlockK = 128, kWarpgroupM = 64;
constexpr int kMathWarpgroups = BLOCK_M / kWarpgroupM, kMathWarps = 4 * kMathWarpgroups;
constexpr int kWeightWarp = kMathWarps, kTokenWarp = kWeightWarp + 1;  // of a warpgroup without other roles
static_assert((kMathWarps + 4) * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // with two math warpgroups: 168 per thread on average
constexpr int kFullArrivals = 3;  // the bytes of weights, the bytes of tokens, the copied weight scales

// Blocks of 128 columns with a scale that a tile touches; it begins at a multiple of kColumnStep in the first one.
template <int kTileN>
constexpr int kColumnStep = kTileN & -kTileN;
template <int kTileN>
constexpr int kScaleBlocks = kScalesOfRows ? 1 : (128 - kColumnStep<kTileN> + kTileN + 127) / 128;

// Bytes of a row of the result in shared memory: 8 rows start in different banks.
template <int kTileN>
constexpr int kRowOfResult = kTileN * 2 + 16;
template <int kBytesOfResult>
struct Result : Once<kBytesOfResult, 1> {};

template <int kTileN>
struct SharedMemory : Stages<kAsManyAsFit, Weights<kTileN>, Tokens<BLOCK_M>, Result<BLOCK_M * kRowOfResult<kTileN>>,
                             TokenScales<BLOCK_M>, Full<1>, Empty<1>, WeightScales<kScaleBlocks<kTileN>>,
                             StagedRowScales<kMathWarpgroups * kTileN>, StagedDenseBias<kMathWarpgroups * kTileN>> {
    DEVICE u32 result(int row, int column) const {
        return this->template at<Result>(row * kRowOfResult<kTileN> + column * 2);
    }
    DEVICE u32 row_scales(int warpgroup) const { return this->template at<StagedRowScales>(warpgroup * kTileN); }
    DEVICE u32 bias(int warpgroup) const { return this->template at<StagedDenseBias>(warpgroup * kTileN / 2); }
};
// K blocks multiplied at once, as registers and stages allow.
template <int kTileN>
constexpr int kStepsAtOnce = kTileN <= 128 && SharedMemory<kTileN>::kStages >= 6 ? 2 : 1;

struct Operands {
    const TensorMap *tokens, *tail_tokens, *weights;
    const float* token_scales;
    const WeightScale* weight_scales;
    const u16* bias;
    int token_scale_k_stride, m, n, k_blocks;
};

// The tiles of a thread block, by their first rows and columns. Tiles of the same columns have consecutive indices and
// run at the same time, so that weights are read from device memory once.
template <int kTileN>
struct Tiles {
    int row_tiles, count, index = blockIdx.x;

    DEVICE Tiles(const Operands& in) {
        row_tiles = ceil_div(in.m, BLOCK_M);
        count = row_tiles * ceil_div(in.n, kTileN);
    }
    DEVICE bool more() const { return index < count; }
    DEVICE void advance() { index += gridDim.x; }
    DEVICE int row() const { return index % row_tiles * BLOCK_M; }
    DEVICE int column() const { return index / row_tiles * kTileN; }
};

// ---- producers: one thread each ------------------------------------------------------------------------------------

template <int kTileN>
DEVICE void load_weights(SharedMemory<kTileN> shared, const Operands& in) {
    Ring<SharedMemory<kTileN>::kStages> ring;
    int last_block = (in.n - 1) / 128;
    for (Tiles<kTileN> tiles(in); tiles.more(); tiles.advance()) {
        int column = tiles.column(), block = column / 128;
        const WeightScale* scales = in.weight_scales + block * in.k_blocks;
        int next = block < last_block ? in.k_blocks : 0;  // a tile may pass N
        int offsets[] = {0, next, block + 1 < last_block ? 2 * in.k_blocks : next};
        fill_stages<barrier_wait>(shared, ring, 0, in.k_blocks, [&](int k, int s, u32 full) {
            const WeightTile to(shared, s);
            barrier_arrive_expect(full, to.kBytes);
            to.load(0, in.weights, full, k, column);
#pragma unroll
            for (int i = 0; i < kScaleBlocks<kTileN>; ++i) to.load_scale(i, scales + offsets[i] + k);
            copy_async_arrive(full);
        });
    }
    finish_copies();
}

template <int kTileN>
DEVICE void load_tokens(SharedMemory<kTileN> shared, const Operands& in) {
    wait_for_previous_kernel();
    fence_proxy_async_global();
    Ring<SharedMemory<kTileN>::kStages> ring;
    for (Tiles<kTileN> tiles(in); tiles.more(); tiles.advance()) {
        int row = tiles.row(), rows = min(BLOCK_M, in.m - row);
        const TensorMap* tokens = rows == BLOCK_M ? in.tokens : in.tail_tokens;
        const float* scales = in.token_scales + row;
        u32 scale_bytes = ceil_div(rows, 4) * 16,
            bytes = ceil_div(rows, SWIZZLE_ROWS) * SWIZZLE_ROWS * kBlockK + scale_bytes;
        fill_stages<barrier_wait>(shared, ring, 0, in.k_blocks, [&](int k, int s, u32 full) {
            barrier_arrive_expect(full, bytes);
            tma_load(shared.tokens(s, 0), tokens, full, k * kBlockK, row);
            bulk_load(shared.token_scale(s, 0), scales, full, scale_bytes);
            scales += in.token_scale_k_stride;
        });
    }
}

// ---- math ----------------------------------------------------------------------------------------------------------

// Products of the scales of a thread's two rows and of the weights. The weights' first scale block ends before column
// `boundary`.
struct Scales {
    float of[3][2];
    int boundary;
};

template <int kTileN>
DEVICE Scales load_scales(SharedMemory<kTileN> shared, int stage, int row, int boundary) {
    Scales scales;
    scales.boundary = boundary;
    float of_row[2] = {load_shared_float(shared.token_scale(stage, row)),
                       load_shared_float(shared.token_scale(stage, row + 8))};
#pragma unroll
    for (int block = 0; block < kScaleBlocks<kTileN>; ++block) {
        float of_block = WeightTile(shared, stage).scale(block);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales.of[block][i] = of_row[i] * of_block;
    }
    return scales;
}

// kTileN and `boundary` are multiples of 16.
template <int kTileN>
DEVICE void add(const Fragment<kTileN>& product, const Scales& scales, Fragment<kTileN>& sum) {
    constexpr int kBlocks = kScaleBlocks<kTileN>;
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
        int column = i / 8 * 16, row = i / 2 % 2;
        float scale = scales.of[0][row];
        if (kBlocks > 1 && column >= scales.boundary) scale = scales.of[1][row];
        if (kBlocks > 2 && column >= scales.boundary + 128) scale = scales.of[2][row];
        sum[i] += scale * product[i];
    }
}

// Multiplies kSteps K blocks, which the tensor cores execute back to back.
template <int kSteps, int kTileN, int kStages>
DEVICE void multiply_steps(SharedMemory<kTileN> shared, Ring<kStages>& ring, int warpgroup, int boundary,
                           Fragment<kTileN>& sum) {
    int rows = warpgroup * kWarpgroupM, row = rows + threadIdx.x / kWarp % 4 * 16 + lane_of_warp() / 4;
    int stages[kSteps];
    Fragment<kTileN> products[kSteps];
    Scales scales[kSteps];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i, ring.advance()) {
        stages[i] = ring.stage;
        barrier_wait(shared.full(stages[i]), ring.phase);
        wgmma_issue(products[i], shared.tokens(stages[i], rows), WeightTile(shared, stages[i]).operand(0));
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) scales[i] = load_scales(shared, stages[i], row, boundary);
    wgmma_wait();
    __syncwarp();  // as in `release`, once for all K blocks
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        wgmma_results_ready(products[i]);
        if (lane_of_warp() == 0) barrier_arrive(shared.empty(stages[i]));
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) add<kTileN>(products[i], scales[i], sum);
}

template <int kTileN, int kStages>
DEVICE void multiply(SharedMemory<kTileN> shared, Ring<kStages>& ring, int k_blocks, int warpgroup, int boundary,
                     Fragment<kTileN>& sum) {
    constexpr int kSteps = kStepsAtOnce<kTileN>;  // several, as each wait for products costs time
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sum[i] = 0.f;
    int k = 0;
#pragma unroll 1
    for (; k <= k_blocks - kSteps; k += kSteps) multiply_steps<kSteps>(shared, ring, warpgroup, boundary, sum);
    if (k < k_blocks) multiply_steps<1>(shared, ring, warpgroup, boundary, sum);
}

// Stores by way of shared memory, so that a thread writes 8 columns of a row at once.
template <int kTileN>
DEVICE void store(SharedMemory<kTileN> shared, int warpgroup, u16* d, const Operands& in, int row, int column,
                  const Fragment<kTileN>& sum) {
    constexpr int kChunks = kTileN / 8;
    int first = warpgroup * kWarpgroupM, rows = min(kWarpgroupM, in.m - row - first), lane = lane_of_warp();
    warpgroup_barrier(warpgroup);  // the previous tile has been stored
#pragma unroll
    for (int i = 0; i < kChunks; i += 2)
        store_matrix_x4(shared.result(first + threadIdx.x / kWarp % 4 * 16 + lane % 16, (i + lane / 16) * 8),
                        pack_bf16x2(sum[4 * i], sum[4 * i + 1]), pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]),
                        pack_bf16x2(sum[4 * i + 4], sum[4 * i + 5]), pack_bf16x2(sum[4 * i + 6], sum[4 * i + 7]));
    warpgroup_barrier(warpgroup);  // this tile is staged
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
        int r = first + i / kChunks, x = i % kChunks * 8;
        if (column + x < in.n)
            *reinterpret_cast<uint4*>(d + i64(row + r) * in.n + column + x) = load_shared_16(shared.result(r, x));
    }
}

// ---- kernel --------------------------------------------------------------------------------------------------------

template <int kTileN>
DEVICE void multiply_tiles(const Operands& in, u16* d) {
    SharedMemory<kTileN> shared{dynamic_shared_address()};
    init_barriers(shared, shared.kStages, kFullArrivals, kMathWarps);
    int warp = warp_uniform(threadIdx.x / kWarp);
    if (warp >= kMathWarps) {
        if (kMathWarpgroups == 2) decrease_registers<kProducerRegisters>();
        if (lane_of_warp() != 0) return;
        if (warp == kWeightWarp) load_weights(shared, in);
        if (warp == kTokenWarp) load_tokens(shared, in);
        return;
    }
    if (kMathWarpgroups == 2) increase_registers<kMathRegisters>();
    Ring<SharedMemory<kTileN>::kStages> ring;
    for (Tiles<kTileN> tiles(in); tiles.more(); tiles.advance()) {
        int row = tiles.row(), column = tiles.column(), columns = min(kTileN, in.n - column);
        Fragment<kTileN> sum;
        copy_row_scales(shared.row_scales(warp / 4), in.weight_scales + column, columns);
        copy_dense_bias(shared.bias(warp / 4), in.bias + column, columns);
        multiply(shared, ring, in.k_blocks, warp / 4, 128 - column % 128, sum);
        await_row_values(warp / 4);
        scale_columns(shared.row_scales(warp / 4), sum);
        add_dense_bias(shared.bias(warp / 4), sum);
        store(shared, warp / 4, d, in, row, column, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_tail_map,
               const __grid_constant__ TensorMap b_map, const float* a_scales, int a_scale_k_stride,
               const WeightScale* b_scales, u16* d, int m, int n, int k, int tile_n, const u16* bias) {
    let_next_kernel_start();
    const Operands in{&a_map, &a_tail_map, &b_map, a_scales, b_scales, bias, a_scale_k_stride, m, n, k / kBlockK};
    switch (tile_n) {
        case 16: multiply_tiles<16>(in, d); break;
        case 32: multiply_tiles<32>(in, d); break;
        case 64: multiply_tiles<64>(in, d); break;
        case 96: multiply_tiles<96>(in, d); break;
        case 112: multiply_tiles<112>(in, d); break;
        case 128: multiply_tiles<128>(in, d); break;
        case 144: multiply_tiles<144>(in, d); break;
        case 160: multiply_tiles<160>(in, d); break;
        case 176: multiply_tiles<176>(in, d); break;
        default: multiply_tiles<192>(in, d);
    }
}
