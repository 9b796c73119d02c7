// D[rows, N] = A[rows, K] @ B[expert, N, K]^T, e4m3 with scales per 1x128 of A and 128x128 of B. For many rows an expert.
//
// A tile is 128 rows of A by BLOCK_N rows of B. One producer thread fills a ring of stages, each 128 along K: A and B by
// TMA, A's scales by a bulk copy, B's by 4-byte copies. Two math warpgroups take 64 rows of A each; the product over 128 K
// of each half of 128 columns lands in one accumulator, which is scaled and added in float32 before the next (DeepGEMM's
// two-level accumulation). Rows of a tile that belong to the next expert are computed and not stored.
//
// With OUTPUT_SWIGLU the halves are 128 channels of the gate and the same 128 of the other projection, so that the group of
// a scale never leaves a warpgroup: D = quantized SiLU(gate) * up, e4m3 [rows, N / 2], as silu_mul_quant.cu has it.
#include "fp8.cuh"
#include "ptx.cuh"
#include "tile_queue.cuh"
#include "wgmma.cuh"

#define OUTPUT_BF16 0         // staged in shared memory, stored by TMA
#define OUTPUT_BF16_DIRECT 1  // stored from registers, with an optional addend C
#define OUTPUT_F32_DIRECT 2
#define OUTPUT_SWIGLU 3  // activated and quantized; staged, stored by TMA

constexpr int kStages = STAGES;
constexpr int kBlockM = 128, kBlockK = 128;
constexpr int kHalfN = 128, kHalves = BLOCK_N / kHalfN;
constexpr bool kSwiglu = OUTPUT == OUTPUT_SWIGLU;
constexpr int kTileN = kSwiglu ? kHalfN : BLOCK_N;  // from a tile's columns to the next one's
constexpr int kMathWarpgroups = 2, kWarpgroupM = kBlockM / kMathWarpgroups;
constexpr int kThreads = 128 * (kMathWarpgroups + 1);
static_assert(kThreads == THREADS, "plan.py has the same roles");
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // together the 168 a thread of the launch
constexpr int kStoreN = kSwiglu ? 128 : 64;                   // columns of a TMA store: 128 bytes, one swizzle row
constexpr int kStoreParts = kHalfN / kStoreN;

// Where everything is in shared memory; tiles are at multiples of 1024 bytes, which their swizzle needs.
struct SharedMemory {
    static constexpr u32 kBytesA = kWarpgroupM * kBlockK, kBytesB = kHalfN * kBlockK, kBytesStore = kWarpgroupM * 128;
    static constexpr u32 kB = kStages * kMathWarpgroups * kBytesA;
    static constexpr u32 kStaging = kB + kStages * kHalves * kBytesB;
    static constexpr u32 kScalesA = kStaging + kMathWarpgroups * kStoreParts * kBytesStore;
    static constexpr u32 kBytesScalesA = (kBlockM + ActivationScales::kSlack) * 4;
    static constexpr u32 kScalesB = kScalesA + kStages * kBytesScalesA;
    static constexpr u32 kTiles = (kScalesB + kStages * kHalves * 4 + 15) / 16 * 16;
    static constexpr u32 kFull = kTiles + kStages * 16, kEmpty = kFull + kStages * 8;
    static constexpr u32 kAmax = kEmpty + kStages * 8;
    static constexpr u32 kEnd = kAmax + (kSwiglu ? 2 * kMathWarpgroups * kWarpgroupM * 4 : 0);

    u32 base;
    DEVICE u32 a(int stage, int row_block) const { return base + (stage * kMathWarpgroups + row_block) * kBytesA; }
    DEVICE u32 b(int stage, int half) const { return base + kB + (stage * kHalves + half) * kBytesB; }
    DEVICE u32 staging(int warpgroup, int part) const {
        return base + kStaging + (warpgroup * kStoreParts + part) * kBytesStore;
    }
    DEVICE u32 a_scale(int stage, int row) const { return base + kScalesA + stage * kBytesScalesA + row * 4; }
    DEVICE u32 b_scale(int stage, int half) const { return base + kScalesB + (stage * kHalves + half) * 4; }
    DEVICE u32 tile(int stage) const { return base + kTiles + stage * 16; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival a math warp
    DEVICE u32 amax(int buffer, int warpgroup, int row) const {
        return base + kAmax + ((buffer * kMathWarpgroups + warpgroup) * kWarpgroupM + row) * 4;
    }
};
static_assert(SharedMemory::kEnd <= SMEM_BYTES && SMEM_BYTES - SharedMemory::kEnd < 1024, "plan.py has the same layout");

struct Operands {
    const TensorMap *a, *b;
    ActivationScales a_scales;
    const float* b_scales;  // [experts, ceil(N / 128), K / 128]
    int n, k_blocks;
};

// ---- producer --------------------------------------------------------------------------------------------------

DEVICE void load_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, TileQueue<kBlockM>& queue) {
    const Tile tile = queue.tile();
    int row_blocks = tile.rows > kWarpgroupM ? 2 : 1;
    int weight_row = tile.expert * in.n + tile.column * kTileN;
    int scale_rows = (in.n + kHalfN - 1) / kHalfN, scale_row = tile.column * (kTileN / kHalfN);
    int next_half = kSwiglu ? scale_rows / 2 : scale_row + 1 < scale_rows;  // in rows of scales; a tile may pass N
    const float* a_scale = in.a_scales.of_tile(tile);
    const float* b_scale = in.b_scales + i64(tile.expert * scale_rows + scale_row) * in.k_blocks;
    u32 a_scale_bytes = ActivationScales::bytes(tile);
    u32 bytes = row_blocks * SharedMemory::kBytesA + kHalves * SharedMemory::kBytesB + a_scale_bytes;
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        u32 full = shared.full(s);
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(full, bytes);
            tma_load(shared.a(s, 0), in.a, full, k * kBlockK, tile.row);
            if (row_blocks > 1) tma_load(shared.a(s, 1), in.a, full, k * kBlockK, tile.row + kWarpgroupM);
            tma_load(shared.b(s, 0), in.b, full, k * kBlockK, weight_row);
            if (kSwiglu) tma_load(shared.b(s, 1), in.b, full, k * kBlockK, weight_row + in.n / 2);
            bulk_load(shared.a_scale(s, 0), a_scale, full, a_scale_bytes);
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                copy_async_4(shared.b_scale(s, half), b_scale + half * next_half * in.k_blocks + k);
            copy_async_arrive(full);
        }
        a_scale += in.a_scales.k_stride;
        queue.step(k);
    }
}

// ---- math ------------------------------------------------------------------------------------------------------

template <int kWidth>
using Columns = float[kWidth / 2];  // of a thread: rows lane/4 and lane/4 + 8, columns 8i + lane%4*2 and the next
using Accumulator = Columns<kHalfN>;

DEVICE void release(SharedMemory shared, int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(stage));
}

// 64 rows by kWidth columns of kCount halves, from a block of rows, a half, and a column of each half on.
template <int kCount, int kWidth>
DEVICE void multiply_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Tile& tile, int row_block,
                          int first_half, int column, Columns<kWidth> (&sum)[kCount]) {
    int row = ActivationScales::offset(tile.row) + row_block * kWarpgroupM + threadIdx.x / 32 % 4 * 16 +
              threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < kCount; ++half)
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sum[half][i] = 0.f;

    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        float a_scale[2] = {load_shared_float(shared.a_scale(s, row)), load_shared_float(shared.a_scale(s, row + 8))};
        float b_scale[kCount];
#pragma unroll
        for (int half = 0; half < kCount; ++half) b_scale[half] = load_shared_float(shared.b_scale(s, first_half + half));
#pragma unroll
        for (int half = 0; half < kCount; ++half) {
            Columns<kWidth> product;
            wgmma_k128(product, shared.a(s, row_block), shared.b(s, first_half + half) + column * kBlockK);
            if (half == kCount - 1) release(shared, s);
            float scale[2] = {a_scale[0] * b_scale[half], a_scale[1] * b_scale[half]};
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) sum[half][i] += scale[i / 2 % 2] * product[i];
        }
    }
}

// A warpgroup without rows only keeps the ring turning.
DEVICE void skip_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks) {
    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        barrier_wait(shared.full(ring.stage), ring.phase);
        release(shared, ring.stage);
    }
}

// ---- epilogue: 64 rows by 128 columns of one warpgroup ----------------------------------------------------------

DEVICE void stage_half(SharedMemory shared, int warpgroup, const Accumulator& sum) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kHalfN / 8; i += 2) {
        int chunk = i + lane / 16;  // of 8 columns, 16 bytes
        u32 to = shared.staging(warpgroup, chunk / 8) + row * 128 + (chunk % 8 ^ row % 8) * 16;
        store_matrix_x4(to, pack_bf16x2(sum[4 * i], sum[4 * i + 1]), pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]),
                        pack_bf16x2(sum[4 * i + 4], sum[4 * i + 5]), pack_bf16x2(sum[4 * i + 6], sum[4 * i + 7]));
    }
}

// The last rows of an expert: the rows below them are the next expert's, so TMA cannot store the box.
DEVICE void copy_half(SharedMemory shared, int warpgroup, u16* d, int n, int row, int rows, int column) {
    constexpr int kChunks = kHalfN / 8;
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
        int r = i / kChunks, chunk = i % kChunks;
        if (column + chunk * 8 < n)
            *reinterpret_cast<uint4*>(d + i64(row + r) * n + column + chunk * 8) =
                load_shared_16(shared.staging(warpgroup, chunk / 8) + r * 128 + (chunk % 8 ^ r % 8) * 16);
    }
}

DEVICE void store_staged(SharedMemory shared, const TensorMap* d_map, u16* d, int n, int row, int rows, int column,
                         int warpgroup, const Accumulator& sum) {
    bool elected = threadIdx.x % 128 == 0;
    if (elected) tma_store_wait_read();
    named_barrier(1 + warpgroup, 128);  // the staging buffer is free
    stage_half(shared, warpgroup, sum);
    fence_proxy_async();
    named_barrier(1 + warpgroup, 128);  // the staging buffer is full
    if (rows < kWarpgroupM) {
        copy_half(shared, warpgroup, d, n, row, rows, column);
    } else if (elected) {
        tma_store(d_map, shared.staging(warpgroup, 0), column, row);
        tma_store(d_map, shared.staging(warpgroup, 1), column + kStoreN, row);
        tma_store_commit();
    }
}

DEVICE void store_direct(void* d, const void* c, int n, int row, int rows, int column, const Accumulator& sum) {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kHalfN / 2; i += 2) {
        int r = first + i / 2 % 2 * 8, x = column + i / 4 * 8 + lane % 4 * 2;
        if (r >= rows || x >= n) continue;
        i64 at = (i64(row + r) * n + x) / 2;
        float2 value = make_float2(sum[i], sum[i + 1]);
        if (OUTPUT == OUTPUT_F32_DIRECT) {
            float2 addend = c ? static_cast<const float2*>(c)[at] : make_float2(0.f, 0.f);
            static_cast<float2*>(d)[at] = make_float2(value.x + addend.x, value.y + addend.y);
        } else {
            float2 addend = unpack_bf16x2(c ? static_cast<const u32*>(c)[at] : 0);
            static_cast<u32*>(d)[at] = pack_bf16x2(value.x + addend.x, value.y + addend.y);
        }
    }
}

// ---- epilogue of OUTPUT_SWIGLU: 64 rows by kWidth channels, which are 128 or, of a short tile, the half of a group ------

struct Quantized {
    const TensorMap* map;
    u8* q;
    float* scales;  // [N / 256, m] at scale_pitch(m)
    int channels, m;
};

// Pairs of SiLU(gate) * up, rounded as if the products of the GEMM had been stored; the rows' largest magnitudes.
template <int kWidth>
DEVICE void activate(const Columns<kWidth>& gate, const Columns<kWidth>& up, u32 (&value)[kWidth / 4], u32 (&amax)[2]) {
    u32 larger[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
        value[i] = silu_mul(pack_bf16x2(gate[2 * i], gate[2 * i + 1]), pack_bf16x2(up[2 * i], up[2 * i + 1]));
        larger[i % 2] = max_u16x2(larger[i % 2], value[i] & kNoSigns);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        amax[r] = larger_of(larger[r]);
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) amax[r] = max(amax[r], __shfl_xor_sync(kAllLanes, amax[r], lanes));
    }
}

// Of a short tile each warpgroup has half of every group. Two buffers, taken in turn: who writes one again has met the
// other warpgroup at the barrier in between, which has then read it.
DEVICE void exchange(SharedMemory shared, int warpgroup, int row, int& buffer, u32 (&amax)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (threadIdx.x % 4 == 0) store_shared(shared.amax(buffer, warpgroup, row + 8 * r), amax[r]);
    named_barrier(1 + kMathWarpgroups, 128 * kMathWarpgroups);
#pragma unroll
    for (int r = 0; r < 2; ++r) amax[r] = max(amax[r], load_shared(shared.amax(buffer, warpgroup ^ 1, row + 8 * r)));
    buffer ^= 1;
}

template <int kPairs>
DEVICE void stage_quantized(u32 staging, int row, const float (&scale)[2], const u32 (&value)[kPairs]) {
    float inverse[2] = {__frcp_rn(scale[0]), __frcp_rn(scale[1])};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        int r = i % 2, column = i / 2 * 8 + threadIdx.x % 4 * 2;
        float2 v = unpack_bf16x2(value[i]);
        u32 to = staging + (row + 8 * r) * 128 + (column / 16 ^ row % 8) * 16 + column % 16;  // row + 8 swizzles alike
        store_shared(to, pack_e4m3x2(divide(v.x, scale[r], inverse[r]), divide(v.y, scale[r], inverse[r])));
    }
}

DEVICE void copy_quantized(u32 staging, const Quantized& out, int row, int rows, int column, int width) {
    int chunks = width / 16;
    for (int i = threadIdx.x % 128; i < rows * chunks; i += 128) {
        int r = i / chunks, chunk = i % chunks;
        *reinterpret_cast<uint4*>(out.q + i64(row + r) * out.channels + column + chunk * 16) =
            load_shared_16(staging + r * 128 + (chunk ^ r % 8) * 16);
    }
}

template <int kWidth>
DEVICE void store_quantized(SharedMemory shared, const Quantized& out, const Tile& tile, int warpgroup, int row_block,
                            int& buffer, const Columns<kWidth>& gate, const Columns<kWidth>& up) {
    constexpr bool kShort = kWidth < kHalfN;
    bool elected = threadIdx.x % 128 == 0;
    int first = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // this thread's, in the block of rows
    int row = tile.row + row_block * kWarpgroupM, rows = min(kWarpgroupM, tile.rows - row_block * kWarpgroupM);
    u32 value[kWidth / 4], amax[2], staging = shared.staging(warpgroup, 0);
    activate<kWidth>(gate, up, value, amax);
    if (kShort) exchange(shared, warpgroup, first, buffer, amax);
    float scale[2] = {group_scale(amax[0]), group_scale(amax[1])};
    if (threadIdx.x % 4 == 0 && !(kShort && warpgroup == 1)) {
        float* scales = out.scales + i64(tile.column) * scale_pitch(out.m) + row + first;
        if (first < rows) scales[0] = scale[0];
        if (first + 8 < rows) scales[8] = scale[1];
    }
    if (elected) tma_store_wait_read();
    named_barrier(1 + warpgroup, 128);  // the staging buffer is free
    stage_quantized(staging, first, scale, value);
    fence_proxy_async();
    named_barrier(1 + warpgroup, 128);  // the staging buffer is full
    int column = tile.column * kHalfN + (kShort ? warpgroup * kWidth : 0);
    if (kShort || rows < kWarpgroupM) {
        copy_quantized(staging, out, row, rows, column, kWidth);
    } else if (elected) {
        tma_store(out.map, staging, column, row);
        tma_store_commit();
    }
}

// ---- kernel ----------------------------------------------------------------------------------------------------

struct Result {
    const TensorMap* map;
    void* d;
    const void* c;
    int n;
};

template <int kCount>
DEVICE void compute_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Result& out, const Tile& tile,
                         int warpgroup, int row_block, int first_half) {
    Accumulator sum[kCount];
    multiply_tile<kCount, kHalfN>(shared, ring, k_blocks, tile, row_block, first_half, 0, sum);
    int row = tile.row + row_block * kWarpgroupM, rows = min(kWarpgroupM, tile.rows - row_block * kWarpgroupM);
#pragma unroll
    for (int half = 0; half < kCount; ++half) {
        int column = tile.column * BLOCK_N + (first_half + half) * kHalfN;
        if (OUTPUT == OUTPUT_BF16)
            store_staged(shared, out.map, static_cast<u16*>(out.d), out.n, row, rows, column, warpgroup, sum[half]);
        else
            store_direct(out.d, out.c, out.n, row, rows, column, sum[half]);
    }
}

template <int kWidth>
DEVICE void compute_swiglu(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Quantized& out,
                           const Tile& tile, int warpgroup, int row_block, int column, int& buffer) {
    Columns<kWidth> sum[2];
    multiply_tile<2, kWidth>(shared, ring, k_blocks, tile, row_block, 0, column, sum);
    store_quantized<kWidth>(shared, out, tile, warpgroup, row_block, buffer, sum[0], sum[1]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                 const __grid_constant__ TensorMap d_map, const float* a_scales, int a_scale_expert_stride,
                 int a_scale_k_stride, const float* b_scales, void* d, const void* c,
                 float* d_scales, const int4* table, int* num_tiles, int m, int n, int k) {
    SharedMemory shared{dynamic_shared_address()};
    init_barriers(shared, kStages, 4 * kMathWarpgroups);

    int warpgroup = threadIdx.x / 128, k_blocks = k / kBlockK;
    Operands in{&a_map, &b_map, {a_scales, a_scale_expert_stride, a_scale_k_stride}, b_scales, n, k_blocks};
    Result out{&d_map, d, c, n};
    Quantized quantized{&d_map, static_cast<u8*>(d), d_scales, n / 2, m};
    Ring<kStages> ring;
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kMathWarpgroups) {
            TileQueue<kBlockM> queue(table, num_tiles, m, (n + BLOCK_N - 1) / BLOCK_N, k_blocks);
            while (queue.index < queue.total) load_tile(shared, ring, in, queue);
            load_end(shared, ring);
            queue.finish();
        }
    } else {
        increase_registers<kMathRegisters>();
        int buffer = 0;
        while (true) {
            barrier_wait(shared.full(ring.stage), ring.phase);
            Tile tile = published_tile(shared.tile(ring.stage));
            if (tile.rows == 0) break;
            if (kSwiglu && tile.rows > kWarpgroupM)
                compute_swiglu<kHalfN>(shared, ring, k_blocks, quantized, tile, warpgroup, warpgroup, 0, buffer);
            else if (kSwiglu)  // few rows: each warpgroup takes half of the channels instead
                compute_swiglu<kHalfN / 2>(shared, ring, k_blocks, quantized, tile, warpgroup, 0,
                                           warpgroup * kHalfN / 2, buffer);
            else if (tile.rows > warpgroup * kWarpgroupM && (kHalves == 1 || tile.rows > kWarpgroupM))
                compute_tile<kHalves>(shared, ring, k_blocks, out, tile, warpgroup, warpgroup, 0);
            else if (kHalves == 2)  // few rows: each warpgroup takes a half of the columns instead
                compute_tile<1>(shared, ring, k_blocks, out, tile, warpgroup, 0, warpgroup);
            else
                skip_tile(shared, ring, k_blocks);
        }
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
