// D[rows, N] = A[rows, K] @ B[expert, N, K]^T, e4m3 with scales per 1x128 of A and 128x128 of B. For many rows an expert.
//
// A tile is 128 rows of A by BLOCK_N rows of B. One producer thread fills a ring of stages, each 128 along K: A and B by
// TMA, A's scales by a bulk copy, B's by 4-byte copies. Two math warpgroups take 64 rows of A each; the product over 128 K
// of each half of 128 columns lands in one accumulator, which is scaled and added in float32 before the next (DeepGEMM's
// two-level accumulation). Rows of a tile that belong to the next expert are computed and not stored.
//
// Up to 16 rows more, the tail of a tile, are multiplied the other way round: 64 of each 128 rows of B are the 64-row
// operand of each warpgroup, the tail is the narrow one. A tile of their own would load all of B once more.
//
// GATHER: row i of A is row a_rows[i] of the matrix `a`, whose scales are row-major. TMA can not do that (a box a row takes
// 25 cycles), so the four producer warps copy 16 bytes a lane, swizzled as TMA would have done.
//
// With OUTPUT_SWIGLU the halves are 128 channels of the gate and the same 128 of the other projection, so that the group of
// a scale never leaves a warpgroup: D = quantized SiLU(gate) * up, e4m3 [rows, N / 2], as silu_mul_quant.cu has it.
#include "fp8.cuh"
#include "ptx.cuh"
#include "tile_queue.cuh"
#include "transposed.cuh"
#include "wgmma.cuh"

#define OUTPUT_BF16 0         // staged in shared memory, stored by TMA
#define OUTPUT_BF16_DIRECT 1  // stored from registers, with an optional addend C
#define OUTPUT_F32_DIRECT 2
#define OUTPUT_SWIGLU 3  // activated and quantized; staged, stored by TMA
#ifndef GATHER
#define GATHER 0
#endif

constexpr int kStages = STAGES;
constexpr int kBlockM = 128, kBlockK = 128, kTailRows = 16;
constexpr int kHalfN = 128, kHalves = BLOCK_N / kHalfN;
constexpr bool kSwiglu = OUTPUT == OUTPUT_SWIGLU;
constexpr int kTileN = kSwiglu ? kHalfN : BLOCK_N;  // from a tile's columns to the next one's
constexpr int kMathWarpgroups = 2, kWarpgroupM = kBlockM / kMathWarpgroups;
constexpr int kThreads = 128 * (kMathWarpgroups + 1);
static_assert(kThreads == THREADS, "plan.py has the same roles");
constexpr int kFullArrivals = GATHER ? 129 : 2;  // of a stage: who announces the bytes of TMA, and every copying thread
constexpr int kProducerBarrier = 2 + kMathWarpgroups;
constexpr int kNarrowBoxes = 2;  // up to 2 x 128 K rows of A come in boxes of 16, which is faster there (NOTES.md)
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // together the 168 a thread of the launch
constexpr int kStoreN = kSwiglu ? 128 : 64;                   // columns of a TMA store: 128 bytes, one swizzle row
constexpr int kStoreParts = kHalfN / kStoreN, kStagedHalves = kSwiglu ? 1 : kHalves;

// Where everything is in shared memory; tiles are at multiples of 1024 bytes, which their swizzle needs.
struct SharedMemory {
    static constexpr u32 kBytesA = (kBlockM + kTailRows) * kBlockK, kBytesB = kHalfN * kBlockK;
    static constexpr u32 kBytesStore = kWarpgroupM * 128, kBytesTail = kTailRows * 128;
    static constexpr u32 kB = kStages * kBytesA;
    static constexpr u32 kStaging = kB + kStages * kHalves * kBytesB;
    static constexpr u32 kTail = kStaging + kMathWarpgroups * kStagedHalves * kStoreParts * kBytesStore;
    static constexpr u32 kScalesA = kTail + (kSwiglu ? 1 : kMathWarpgroups * kHalves) * kBytesTail;
    static constexpr u32 kBytesScalesA = (kBlockM + kTailRows + ActivationScales::kSlack) * 4;
    static constexpr u32 kScalesB = kScalesA + kStages * kBytesScalesA;
    static constexpr u32 kTiles = (kScalesB + kStages * kHalves * 4 + 15) / 16 * 16;
    static constexpr u32 kFull = kTiles + kStages * 16, kEmpty = kFull + kStages * 8;
    static constexpr u32 kAmax = kEmpty + kStages * 8;
    static constexpr u32 kGatheredTile = kAmax + (kSwiglu ? 2 * kMathWarpgroups * kWarpgroupM * 4 : 0);
    static constexpr u32 kEnd = kGatheredTile + (GATHER ? 16 : 0);

    u32 base;
    DEVICE u32 a(int stage, int row) const { return base + stage * kBytesA + row * kBlockK; }
    DEVICE u32 b(int stage, int half) const { return base + kB + (stage * kHalves + half) * kBytesB; }
    DEVICE u32 staging(int warpgroup, int half, int part) const {
        return base + kStaging + ((warpgroup * kStagedHalves + half) * kStoreParts + part) * kBytesStore;
    }
    DEVICE u32 tail(int warpgroup, int half) const { return base + kTail + (warpgroup * kHalves + half) * kBytesTail; }
    DEVICE u32 a_scale(int stage, int row) const { return base + kScalesA + stage * kBytesScalesA + row * 4; }
    DEVICE u32 b_scale(int stage, int half) const { return base + kScalesB + (stage * kHalves + half) * 4; }
    DEVICE u32 tile(int stage) const { return base + kTiles + stage * 16; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival a math warp
    DEVICE u32 amax(int buffer, int warpgroup, int row) const {
        return base + kAmax + ((buffer * kMathWarpgroups + warpgroup) * kWarpgroupM + row) * 4;
    }
    DEVICE u32 gathered_tile() const { return base + kGatheredTile; }
};
static_assert(SharedMemory::kEnd <= SMEM_BYTES && SMEM_BYTES - SharedMemory::kEnd < 1024, "plan.py has the same layout");

struct Operands {
    const TensorMap *a, *tail, *b;  // the boxes of a tail are narrower than those of the other rows of A
    const uint4* gathered;
    const int* a_rows;
    ActivationScales a_scales;
    const float* b_scales;  // [experts, ceil(N / 128), K / 128]
    int n, k_blocks;
};

// ---- producer --------------------------------------------------------------------------------------------------

struct WeightScales {
    const float* data;
    int next_half;  // from the scale of one half to that of the next

    DEVICE WeightScales(const Operands& in, const Tile& tile) {
        int rows = (in.n + kHalfN - 1) / kHalfN, row = tile.column * (kTileN / kHalfN);
        data = in.b_scales + i64(tile.expert * rows + row) * in.k_blocks;
        next_half = (kSwiglu ? rows / 2 : row + 1 < rows) * in.k_blocks;  // a tile may pass N
    }
    DEVICE void copy(SharedMemory shared, int stage, int k) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) copy_async_4(shared.b_scale(stage, half), data + half * next_half + k);
    }
};

DEVICE void load_b(SharedMemory shared, int stage, const Operands& in, const Tile& tile, int k) {
    int row = tile.expert * in.n + tile.column * kTileN;
    tma_load(shared.b(stage, 0), in.b, shared.full(stage), k * kBlockK, row);
    if (kSwiglu) tma_load(shared.b(stage, 1), in.b, shared.full(stage), k * kBlockK, row + in.n / 2);
}

DEVICE void load_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, TileQueue<kBlockM>& queue) {
    const Tile tile = queue.tile();
    const WeightScales b_scales(in, tile);
    const bool narrow = in.k_blocks <= kNarrowBoxes;
    const TensorMap* a = narrow ? in.tail : in.a;
    int box = narrow ? kTailRows : kWarpgroupM, rows = narrow ? tile.rows : min(tile.rows, kBlockM);
    rows = (rows + box - 1) / box * box;
    int tail_rows = !narrow && tile.rows > kBlockM ? kTailRows : 0;
    const float* a_scale = in.a_scales.of_tile(tile);
    u32 a_scale_bytes = ActivationScales::bytes(tile);
    u32 bytes = (rows + tail_rows) * kBlockK + kHalves * SharedMemory::kBytesB + a_scale_bytes;
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        u32 full = shared.full(s);
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(full, bytes);
            load_b(shared, s, in, tile, k);
#pragma unroll 1
            for (int row = 0; row < rows; row += box)
                tma_load(shared.a(s, row), a, full, k * kBlockK, tile.row + row);
            if (tail_rows > 0) tma_load(shared.a(s, kBlockM), in.tail, full, k * kBlockK, tile.row + kBlockM);
            bulk_load(shared.a_scale(s, 0), a_scale, full, a_scale_bytes);
            b_scales.copy(shared, s, k);
            copy_async_arrive(full);
        }
        a_scale += in.a_scales.k_stride;
        queue.step(k);
    }
}

// ---- producers of GATHER: a warp copies 32 rows, eight lanes a row; the first warp loads B besides ------------------

constexpr int kChunks = kBlockK / 16, kRowsAtOnce = 32 / kChunks;
constexpr u32 kNoRow = ~0u;

// Where rows of a tile start in `gathered`, in chunks of 16 bytes; kNoRow past the tile. Thread i holds row i for its warp
// and the row of the tail that it copies a chunk of.
struct GatheredRows {
    u32 row, tail;

    DEVICE GatheredRows(const Operands& in, const Tile& tile) {
        auto start_of = [&](int i) { return i < tile.rows ? u32(in.a_rows[tile.row + i]) * in.k_blocks * kChunks : kNoRow; };
        row = start_of(threadIdx.x % 128);
        tail = start_of(kBlockM + threadIdx.x % 128 / kChunks);
    }
    DEVICE static void copy_chunk(SharedMemory shared, int stage, const Operands& in, int k, int to, u32 from) {
        int chunk = threadIdx.x % kChunks;
        if (from != kNoRow)
            copy_async_16(shared.a(stage, to) + (chunk ^ to % 8) * 16, in.gathered + (from + k * kChunks + chunk));
    }
    DEVICE static void copy_scale(SharedMemory shared, int stage, const Operands& in, int k, int to, u32 from) {
        if (from != kNoRow) copy_async_4(shared.a_scale(stage, to), in.a_scales.data + (from / kChunks + k));
    }
    DEVICE void copy(SharedMemory shared, int stage, const Operands& in, int k) const {
        int thread = threadIdx.x % 128, group = thread % 32 / kChunks;
#pragma unroll
        for (int i = 0; i < 32; i += kRowsAtOnce)
            copy_chunk(shared, stage, in, k, thread / 32 * 32 + i + group, __shfl_sync(kAllLanes, row, i + group));
        copy_chunk(shared, stage, in, k, kBlockM + thread / kChunks, tail);
        copy_scale(shared, stage, in, k, thread, row);
        if (thread % kChunks == 0) copy_scale(shared, stage, in, k, kBlockM + thread / kChunks, tail);
    }
};

// The first warp hands the tile to the others through shared memory.
DEVICE Tile share_tile(SharedMemory shared, const TileQueue<kBlockM>& queue, bool first_warp) {
    named_barrier(kProducerBarrier, 128);  // all have read the tile before
    if (first_warp && threadIdx.x % 32 == 0) publish_tile(shared.gathered_tile(), queue.tile());
    named_barrier(kProducerBarrier, 128);
    return published_tile(shared.gathered_tile());
}

DEVICE void gather_tile(SharedMemory shared, Ring<kStages>& ring, const Operands& in, const Tile& tile,
                        TileQueue<kBlockM>& queue, bool first_warp) {
    const WeightScales b_scales(in, tile);
    const GatheredRows rows(in, tile);
#pragma unroll 1
    for (int k = 0; k < in.k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.empty(s), ring.phase ^ 1);
        if (first_warp && threadIdx.x % 32 == 0) {
            if (k == 0) publish_tile(shared.tile(s), tile);
            barrier_arrive_expect(shared.full(s), kHalves * SharedMemory::kBytesB);
            load_b(shared, s, in, tile, k);
            b_scales.copy(shared, s, k);
        }
        rows.copy(shared, s, in, k);
        copy_async_arrive(shared.full(s));
        if (first_warp) queue.step(k);
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

// Of a tail, 64 rows of B of each half by 16 rows of A, transposed: a thread holds rows lane/4 and lane/4 + 8 of B, rows
// 8i + lane%4*2 and the next of the tail.
using Tail = float[kTailRows / 2];

DEVICE void add_tail(SharedMemory shared, int s, int row, float b_scale, Tail& product, Tail& sum) {
    wgmma_results_ready(product);
#pragma unroll
    for (int i = 0; i < kTailRows / 2; ++i)  // scales read here and not before: registers are scarce while wgmma runs
        sum[i] += load_shared_float(shared.a_scale(s, row + i / 4 * 8 + i % 2)) * b_scale * product[i];
}

// 64 rows by kWidth columns of kCount halves, from a block of rows, a half, and a column of each half on; and the tail.
template <int kCount, int kWidth, bool kTail>
DEVICE void multiply_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Tile& tile, int row_block,
                          int first_half, int column, Columns<kWidth> (&sum)[kCount], Tail (&tail)[kHalves]) {
    int first = GATHER ? 0 : ActivationScales::offset(tile.row), tail_row = first + kBlockM + threadIdx.x % 4 * 2;
    int row = first + row_block * kWarpgroupM + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < kCount; ++half)
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sum[half][i] = 0.f;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kTailRows / 2; ++i) tail[half][i] = 0.f;

    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        int s = ring.stage;
        barrier_wait(shared.full(s), ring.phase);
        if (GATHER) fence_proxy_async();  // the copies of A are ordinary writes
        float a_scale[2] = {load_shared_float(shared.a_scale(s, row)), load_shared_float(shared.a_scale(s, row + 8))};
#pragma unroll
        for (int half = 0; half < kCount; ++half) {
            Columns<kWidth> product;
            Tail tail_product;
            wgmma_fence();
            wgmma_issue_k128(product, shared.a(s, row_block * kWarpgroupM),
                             shared.b(s, first_half + half) + column * kBlockK);
            if (kTail)
                wgmma_issue_k128(tail_product, shared.b(s, half) + row_block * kWarpgroupM * kBlockK,
                                 shared.a(s, kBlockM));
            wgmma_commit();
            float b_scale = load_shared_float(shared.b_scale(s, first_half + half));
            float scale[2] = {a_scale[0] * b_scale, a_scale[1] * b_scale};
            wgmma_wait();
            wgmma_results_ready(product);
            if (kTail) add_tail(shared, s, tail_row, b_scale, tail_product, tail[half]);
            if (half == kCount - 1) release(shared, s);
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

DEVICE void stage_half(SharedMemory shared, int warpgroup, int half, const Accumulator& sum) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kHalfN / 8; i += 2) {
        int chunk = i + lane / 16;  // of 8 columns, 16 bytes
        u32 to = shared.staging(warpgroup, half, chunk / 8) + row * 128 + (chunk % 8 ^ row % 8) * 16;
        store_matrix_x4(to, pack_bf16x2(sum[4 * i], sum[4 * i + 1]), pack_bf16x2(sum[4 * i + 2], sum[4 * i + 3]),
                        pack_bf16x2(sum[4 * i + 4], sum[4 * i + 5]), pack_bf16x2(sum[4 * i + 6], sum[4 * i + 7]));
    }
}

// The last rows of an expert: the rows below them are the next expert's, so TMA cannot store the box.
DEVICE void copy_half(SharedMemory shared, int warpgroup, int half, u16* d, int n, int row, int rows, int column) {
    constexpr int kChunks = kHalfN / 8;
    for (int i = threadIdx.x % 128; i < rows * kChunks; i += 128) {
        int r = i / kChunks, chunk = i % kChunks;
        if (column + chunk * 8 < n)
            *reinterpret_cast<uint4*>(d + i64(row + r) * n + column + chunk * 8) =
                load_shared_16(shared.staging(warpgroup, half, chunk / 8) + r * 128 + (chunk % 8 ^ r % 8) * 16);
    }
}

template <int kCount>
DEVICE void store_staged(SharedMemory shared, const TensorMap* d_map, u16* d, int n, int row, int rows, int column,
                         int warpgroup, const Accumulator (&sum)[kCount]) {
    bool elected = threadIdx.x % 128 == 0;
    if (elected) tma_store_wait_read();
    named_barrier(1 + warpgroup, 128);  // the staging buffers are free
#pragma unroll
    for (int half = 0; half < kCount; ++half) stage_half(shared, warpgroup, half, sum[half]);
    fence_proxy_async();
    named_barrier(1 + warpgroup, 128);  // the staging buffers are full
    if (rows < kWarpgroupM) {
#pragma unroll 1
        for (int half = 0; half < kCount; ++half)
            copy_half(shared, warpgroup, half, d, n, row, rows, column + half * kHalfN);
    } else if (elected) {
#pragma unroll
        for (int part = 0; part < kCount * kStoreParts; ++part)
            tma_store(d_map, shared.staging(warpgroup, 0, part), column + part * kStoreN, row);
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

DEVICE void store_tail_direct(void* d, const void* c, int n, int row, int rows, int column, const Tail& sum) {
    int lane = threadIdx.x % 32, first = column + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTailRows / 2; ++i) {
        int r = i / 4 * 8 + lane % 4 * 2 + i % 2, x = first + i / 2 % 2 * 8;
        if (r >= rows || x >= n) continue;
        i64 at = i64(row + r) * n + x;
        if (OUTPUT == OUTPUT_F32_DIRECT)
            static_cast<float*>(d)[at] = sum[i] + (c ? static_cast<const float*>(c)[at] : 0.f);
        else
            static_cast<u16*>(d)[at] = u16(pack_bf16x2(sum[i] + (c ? bf16_value(static_cast<const u16*>(c)[at]) : 0.f), 0.f));
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
#pragma unroll 1
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
    u32 value[kWidth / 4], amax[2], staging = shared.staging(warpgroup, 0, 0);
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

// The tail: 16 tokens by 64 channels a warpgroup, so that both share every group. Values are pairs of tokens.
DEVICE void store_quantized_tail(SharedMemory shared, const Quantized& out, const Tile& tile, int warpgroup, int& buffer,
                                 const Tail& gate, const Tail& up) {
    constexpr int kMathWarps = 4 * kMathWarpgroups, kBlocks = kTailRows / 8;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = tile.row + kBlockM, rows = tile.rows - kBlockM;
    auto amax_at = [&](int from, int block) { return shared.amax(buffer, 0, (from * kBlocks + block) * 4 + lane % 4); };
    u32 value[kTailRows / 4];
#pragma unroll
    for (int i = 0; i < kTailRows / 4; ++i)
        value[i] = silu_mul(pack_bf16x2(gate[2 * i], gate[2 * i + 1]), pack_bf16x2(up[2 * i], up[2 * i + 1]));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        u32 amax = max_u16x2(value[2 * block] & kNoSigns, value[2 * block + 1] & kNoSigns);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) amax = max_u16x2(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
        if (lane < 4) store_shared(amax_at(warp, block), amax);
    }
    named_barrier(1 + kMathWarpgroups, 128 * kMathWarpgroups);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        u32 amax = 0;
#pragma unroll
        for (int from = 0; from < kMathWarps; ++from) amax = max_u16x2(amax, load_shared(amax_at(from, block)));
        float scale[2] = {group_scale(amax << 16), group_scale(amax & 0xFFFF0000)};
        float inverse[2] = {__frcp_rn(scale[0]), __frcp_rn(scale[1])};
        int token = block * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float2 v = unpack_bf16x2(value[2 * block + i]);
            u16 q = pack_e4m3x2(divide(v.x, scale[0], inverse[0]), divide(v.y, scale[1], inverse[1]));
            u32 to = shared.tail(0, 0) + token * 128 + warp * 16 + lane / 4 + i * 8;
            store_shared(to, u8(q));
            store_shared(to + 128, u8(q >> 8));
        }
        float* scales = out.scales + i64(tile.column) * scale_pitch(out.m) + row + token;
        if (warp == 0 && lane < 4 && token < rows) scales[0] = scale[0];
        if (warp == 0 && lane < 4 && token + 1 < rows) scales[1] = scale[1];
    }
    buffer ^= 1;
    named_barrier(1 + warpgroup, 128);
    int token = threadIdx.x % 128 / 4, chunk = warpgroup * 4 + threadIdx.x % 4;
    if (token < rows)
        *reinterpret_cast<uint4*>(out.q + i64(row + token) * out.channels + tile.column * kHalfN + chunk * 16) =
            load_shared_16(shared.tail(0, 0) + token * 128 + chunk * 16);
}

// ---- kernel ----------------------------------------------------------------------------------------------------

struct Result {
    const TensorMap* map;
    void* d;
    const void* c;
    int n;
};

template <int kCount, bool kTail>
DEVICE void compute_tile(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Result& out, const Tile& tile,
                         int warpgroup, int row_block, int first_half) {
    Accumulator sum[kCount];
    Tail tail[kHalves];
    multiply_tile<kCount, kHalfN, kTail>(shared, ring, k_blocks, tile, row_block, first_half, 0, sum, tail);
    int row = tile.row + row_block * kWarpgroupM, rows = min(kWarpgroupM, tile.rows - row_block * kWarpgroupM);
    int column = tile.column * BLOCK_N + first_half * kHalfN;
    if (OUTPUT == OUTPUT_BF16)
        store_staged<kCount>(shared, out.map, static_cast<u16*>(out.d), out.n, row, rows, column, warpgroup, sum);
    else
#pragma unroll
        for (int half = 0; half < kCount; ++half)
            store_direct(out.d, out.c, out.n, row, rows, column + half * kHalfN, sum[half]);
    if (!kTail) return;
    row = tile.row + kBlockM, rows = tile.rows - kBlockM, column += warpgroup * kWarpgroupM;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        if (OUTPUT == OUTPUT_BF16)
            store_transposed<kTailRows>(shared.tail(warpgroup, half), warpgroup, static_cast<u16*>(out.d), out.n, row,
                                        rows, column + half * kHalfN, tail[half]);
        else
            store_tail_direct(out.d, out.c, out.n, row, rows, column + half * kHalfN, tail[half]);
    }
}

template <int kWidth, bool kTail>
DEVICE void compute_swiglu(SharedMemory shared, Ring<kStages>& ring, int k_blocks, const Quantized& out,
                           const Tile& tile, int warpgroup, int row_block, int column, int& buffer) {
    Columns<kWidth> sum[2];
    Tail tail[kHalves];
    multiply_tile<2, kWidth, kTail>(shared, ring, k_blocks, tile, row_block, 0, column, sum, tail);
    store_quantized<kWidth>(shared, out, tile, warpgroup, row_block, buffer, sum[0], sum[1]);
    if (kTail) store_quantized_tail(shared, out, tile, warpgroup, buffer, tail[0], tail[kHalves - 1]);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap tail_map,
                 const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap d_map, const float* a_scales, int a_scale_expert_stride,
                 int a_scale_k_stride, const float* b_scales, const uint4* gathered,
                 const int* a_rows, void* d, const void* c,
                 float* d_scales, const int4* table, int* num_tiles, int m, int n, int k) {
    SharedMemory shared{__shfl_sync(kAllLanes, dynamic_shared_address(), 0)};
    init_barriers(shared, kStages, kFullArrivals, 4 * kMathWarpgroups);

    int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0), k_blocks = k / kBlockK;
    Operands in{&a_map, &tail_map, &b_map, gathered, a_rows, {a_scales, a_scale_expert_stride, a_scale_k_stride}, b_scales, n, k_blocks};
    Result out{&d_map, d, c, n};
    Quantized quantized{&d_map, static_cast<u8*>(d), d_scales, n / 2, m};
    Ring<kStages> ring;
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        bool first_warp = threadIdx.x / 32 == 4 * kMathWarpgroups;
        if (GATHER || first_warp) {
            TileQueue<kBlockM> queue(table, num_tiles, m, (n + BLOCK_N - 1) / BLOCK_N, k_blocks);
            while (true) {
                if (GATHER) {
                    Tile tile = share_tile(shared, queue, first_warp);
                    if (tile.rows == 0) break;
                    gather_tile(shared, ring, in, tile, queue, first_warp);
                } else {
                    if (queue.index >= queue.total) break;
                    load_tile(shared, ring, in, queue);
                }
            }
            if (first_warp) {
                load_end(shared, ring, kFullArrivals);
                queue.finish();
            }
        }
    } else {
        increase_registers<kMathRegisters>();
        int buffer = 0;
        while (true) {
            barrier_wait(shared.full(ring.stage), ring.phase);
            Tile tile = published_tile(shared.tile(ring.stage));
            if (tile.rows == 0) break;
            if (kSwiglu && tile.rows > kBlockM)
                compute_swiglu<kHalfN, true>(shared, ring, k_blocks, quantized, tile, warpgroup, warpgroup, 0, buffer);
            else if (kSwiglu && tile.rows > kWarpgroupM)
                compute_swiglu<kHalfN, false>(shared, ring, k_blocks, quantized, tile, warpgroup, warpgroup, 0, buffer);
            else if (kSwiglu)  // few rows: each warpgroup takes half of the channels instead
                compute_swiglu<kHalfN / 2, false>(shared, ring, k_blocks, quantized, tile, warpgroup, 0,
                                                  warpgroup * kHalfN / 2, buffer);
            else if (tile.rows > kBlockM)
                compute_tile<kHalves, true>(shared, ring, k_blocks, out, tile, warpgroup, warpgroup, 0);
            else if (tile.rows > warpgroup * kWarpgroupM && (kHalves == 1 || tile.rows > kWarpgroupM))
                compute_tile<kHalves, false>(shared, ring, k_blocks, out, tile, warpgroup, warpgroup, 0);
            else if (kHalves == 2)  // few rows: each warpgroup takes a half of the columns instead
                compute_tile<1, false>(shared, ring, k_blocks, out, tile, warpgroup, 0, warpgroup);
            else
                skip_tile(shared, ring, k_blocks);
        }
        if (threadIdx.x % 128 == 0) tma_store_wait();
    }
}
