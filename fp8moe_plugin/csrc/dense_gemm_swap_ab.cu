// D[m, N] = A[m, K] @ B[N, K]^T, for few rows: every multiprocessor streams the same number of bytes of weights, once.
//
// Stream-K (Osama et al., arXiv 2301.03598), swap-AB: a unit is 128 rows of weights by 128 K. All units, K fastest, are
// dealt to the blocks in runs of `share`, so that a block may begin within a tile and leave another one unfinished.
// Those that share a tile leave their sums in memory, and the one that comes last adds them up in the order of K. The
// units of a block depend on N, K and `share` alone: neither does how a row's result is summed up depend on m.
//
// In:   a_map     boxes of `width` rows, as many as a tile: 8, 16, 32, 64 or 128, the least that hold m or else 128
//       a_scales  float32, rows contiguous, (row, k block) at row + k * a_scale_k_stride; b_scales  [N / 128, K / 128]
//       partial   float4 [row tiles, 2 * blocks, width / 8, math threads], and
//       arrived   int32 [row tiles, ceil(N / 128), 2], zero: of both warpgroups; where blocks share tiles
// Out:  d         bfloat16 [m, N]
//
// Launched early it loads weights beside the kernel that quantizes A.
#include "ptx.cuh"
#include "split_k.cuh"
#include "swap_ab.cuh"
#include "transposed.cuh"

constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // together the 168 a thread of the launch

// Where everything is in shared memory; tiles are at multiples of 1024 bytes, which their swizzle needs.
template <int kTokens>
struct SharedMemory {
    static constexpr u32 kBytesWeights = kBlockN * kBlockK, kBytesTokens = kTokens * kBlockK;
    static constexpr u32 kBytesScales = kTokens * 4, kBytesStaging = kTokens * kWarpgroupN * 2;
    static constexpr u32 kBytesStage = kBytesWeights + kBytesTokens + kBytesScales + 4 + 2 * 8;
    static constexpr int kStages = (SMEM_BYTES - kMathWarpgroups * (kBytesStaging + 4)) / kBytesStage;
    static constexpr u32 kTokenTiles = kStages * kBytesWeights, kStaging = kTokenTiles + kStages * kBytesTokens;
    static constexpr u32 kScales = kStaging + kMathWarpgroups * kBytesStaging;
    static constexpr u32 kFull = kScales + kStages * kBytesScales, kEmpty = kFull + kStages * 8;
    static constexpr u32 kWeightScales = kEmpty + kStages * 8, kLast = kWeightScales + kStages * 4;
    static_assert(kLast + kMathWarpgroups * 4 <= SMEM_BYTES, "as many stages as there is room for");

    u32 base;
    DEVICE u32 weights(int stage, int warpgroup) const {
        return base + stage * kBytesWeights + warpgroup * kWarpgroupN * kBlockK;
    }
    DEVICE u32 tokens(int stage, int token) const {
        return base + kTokenTiles + stage * kBytesTokens + token * kBlockK;
    }
    DEVICE u32 staging(int warpgroup) const { return base + kStaging + warpgroup * kBytesStaging; }
    DEVICE u32 token_scale(int stage, int token) const { return base + kScales + stage * kBytesScales + token * 4; }
    DEVICE u32 weight_scale(int stage) const { return base + kWeightScales + stage * 4; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival a math warp
    DEVICE u32 last(int warpgroup) const { return base + kLast + warpgroup * 4; }
};

struct Operands {
    const TensorMap *tokens, *weights;
    const float *token_scales, *weight_scales;
    int token_scale_k_stride, m, n, k_blocks, share;

    DEVICE int columns() const { return (n + kBlockN - 1) / kBlockN; }
};

struct Result {
    u16* d;
    float4* partial;
    int* arrived;
};

// The units of this block. Those of the tile that it leaves unfinished come first, so that what it shares with other
// blocks is added up while it streams and not at its end.
struct Share {
    int begin, count, tail;

    DEVICE Share(const Operands& in) {
        begin = blockIdx.x * in.share;
        count = min(in.share, in.columns() * in.k_blocks - begin);
        tail = min((begin + count) % in.k_blocks, count);
    }
    DEVICE int unit(int i) const { return begin + (i < tail ? count - tail + i : i - tail); }
};

// Goes through the units of a block without dividing for each, which would take as long as its bytes.
struct Units {
    const Share& share;
    int k_blocks, i, index, column, k;

    DEVICE Units(const Operands& in, const Share& share) : share(share), k_blocks(in.k_blocks), i(0) { look_up(); }
    DEVICE void look_up() { index = share.unit(i), column = index / k_blocks, k = index - column * k_blocks; }
    DEVICE void advance() {
        ++i, ++index;
        if (++k == k_blocks) k = 0, ++column;
        if (i == share.tail) look_up();
    }
};

// ---- producer: one thread ----------------------------------------------------------------------------------------

template <int kTokens>
struct Loads {
    SharedMemory<kTokens> shared;
    const Operands& in;
    int row, rows;  // of the tile

    DEVICE u32 scale_bytes() const { return (rows + 3) / 4 * 16; }
    DEVICE void weights(int s, const Units& unit) const {
        barrier_arrive_expect(shared.full(s), shared.kBytesWeights + shared.kBytesTokens + scale_bytes());
        tma_load(shared.weights(s, 0), in.weights, shared.full(s), unit.k * kBlockK, unit.column * kBlockN);
        copy_async_4(shared.weight_scale(s), in.weight_scales + unit.index);
    }
    DEVICE void tokens(int s, const Units& unit) const {
        tma_load(shared.tokens(s, 0), in.tokens, shared.full(s), unit.k * kBlockK, row);
        bulk_load(shared.token_scale(s, 0), in.token_scales + i64(unit.k) * in.token_scale_k_stride + row,
                  shared.full(s), scale_bytes());
        copy_async_arrive(shared.full(s));
    }
};

// Weights of the first stages do not depend on the kernel before.
template <int kTokens>
DEVICE void load_share(SharedMemory<kTokens> shared, const Operands& in, const Share& share) {
    Ring<SharedMemory<kTokens>::kStages> ring;
    Loads<kTokens> loads{shared, in, 0, min(kTokens, in.m)};
    int ahead = min(SharedMemory<kTokens>::kStages, share.count);
    for (Units unit(in, share); unit.i < ahead; unit.advance()) loads.weights(unit.i, unit);
    wait_for_previous_kernel();
    for (; loads.row < in.m; loads.row += kTokens) {
        loads.rows = min(kTokens, in.m - loads.row);
#pragma unroll 1
        for (Units unit(in, share); unit.i < share.count; unit.advance(), --ahead, ring.advance()) {
            int s = ring.stage;
            barrier_wait(shared.empty(s), ring.phase ^ 1);
            if (ahead <= 0) loads.weights(s, unit);
            loads.tokens(s, unit);
        }
    }
    copy_async_wait();  // PTX promises no arrivals of threads that have exited
}

// ---- math --------------------------------------------------------------------------------------------------------

// Adds up the parts of a tile; false for a block that is not the last of those that share it. A block has two places
// for parts, of the tile that it begins within and of the one that it leaves unfinished: there each thread has 16 bytes
// for 8 tokens.
template <int kTokens>
DEVICE bool add_parts(SharedMemory<kTokens> shared, const Operands& in, const Result& out, int row, int column,
                      int warpgroup, float (&sum)[kTokens / 2]) {
    constexpr int kOctets = kTokens / 8, kAtOnce = kTokens <= 32 ? 8 : kTokens == 64 ? 4 : 1;
    int first = column * in.k_blocks / in.share, last = ((column + 1) * in.k_blocks - 1) / in.share;
    int row_tile = row / kTokens;
    float4* parts = out.partial + i64(row_tile) * 2 * gridDim.x * kOctets * kMathThreads + threadIdx.x;
    auto of_block = [&](int block) { return parts + (2 * block + (block == first)) * kOctets * kMathThreads; };
    float4* own = of_block(blockIdx.x);
#pragma unroll
    for (int i = 0; i < kOctets; ++i)
        own[i * kMathThreads] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);

    int* arrived = out.arrived + (row_tile * in.columns() + column) * kMathWarpgroups + warpgroup;
    if (!comes_last(shared.last(warpgroup), arrived, last - first + 1, 1 + warpgroup, 128)) return false;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.f;
    for (int begin = first; begin <= last; begin += kAtOnce) {
        float4 part[kAtOnce][kOctets];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)  // in flight at once, as many as there are registers for
#pragma unroll
            for (int i = 0; i < kOctets; ++i)
                if (begin + j <= last) part[j][i] = __ldcg(of_block(begin + j) + i * kMathThreads);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
            for (int i = 0; i < kOctets; ++i)
                if (begin + j <= last) {
                    sum[4 * i] += part[j][i].x, sum[4 * i + 1] += part[j][i].y;
                    sum[4 * i + 2] += part[j][i].z, sum[4 * i + 3] += part[j][i].w;
                }
    }
    return true;
}

template <int kTokens>
DEVICE void multiply_share(SharedMemory<kTokens> shared, const Operands& in, const Result& out, const Share& share,
                           int warpgroup) {
    Ring<SharedMemory<kTokens>::kStages> ring;
    float sum[kTokens / 2];
#pragma unroll 1
    for (int row = 0; row < in.m; row += kTokens) {
#pragma unroll 1
        for (int i = 0, steps; i < share.count; i += steps) {
            int unit = share.unit(i), column = unit / in.k_blocks;
            steps = min((column + 1) * in.k_blocks, share.begin + share.count) - unit;
            multiply_tile<kTokens>(shared, ring, steps, 0, warpgroup, sum);
            if (steps == in.k_blocks || add_parts<kTokens>(shared, in, out, row, column, warpgroup, sum))
                store_transposed<kTokens>(shared.staging(warpgroup), warpgroup, out.d, in.n, row,
                                          min(kTokens, in.m - row), column * kBlockN + warpgroup * kWarpgroupN, sum);
        }
    }
}

// ---- kernel ------------------------------------------------------------------------------------------------------

template <int kTokens>
DEVICE void run(const Operands& in, const Result& out) {
    SharedMemory<kTokens> shared{dynamic_shared_address()};
    init_barriers(shared, shared.kStages, kFullArrivals, 4 * kMathWarpgroups);
    int warpgroup = warp_uniform(threadIdx.x / 128);
    const Share share(in);
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x == kMathThreads) load_share(shared, in, share);
    } else {
        increase_registers<kMathRegisters>();
        multiply_share(shared, in, out, share, warpgroup);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    dense_gemm_swap_ab(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                       const float* a_scales, int a_scale_k_stride, const float* b_scales, u16* d, float4* partial,
                       int* arrived, int m, int n, int k, int width, int share) {
    let_next_kernel_start();
    const Operands in{&a_map, &b_map, a_scales, b_scales, a_scale_k_stride, m, n, k / kBlockK, share};
    const Result out{d, partial, arrived};
    switch (width) {
        case 8: run<8>(in, out); break;
        case 16: run<16>(in, out); break;
        case 32: run<32>(in, out); break;
        case 64: run<64>(in, out); break;
        default: run<128>(in, out);
    }
}
