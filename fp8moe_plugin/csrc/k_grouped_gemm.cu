// D[g] = C[g] + A[g] @ B[g]^T for groups that differ in K: gradients of weights. Both e4m3 operands have a scale for
// each row and 128 channels, D and C are float32.
//
// A tile is 128 rows by 176 columns of a group's result, over all of its K. One producer thread fills the stages of a
// ring, each a K block of 128, by TMA and bulk copies. Two math warpgroups take 64 rows each. The product of a K block
// lands in one accumulator and is scaled by row and column and added to another in float32 before the next (DeepGEMM's
// two-level accumulation). No wider tile has registers for both and for the scales of its columns.
//
// B is loaded in an order in which the columns that a thread has of 16 follow one another: it reads four scales, and
// writes four results, at once.
//
// In:   groups    GROUPS entries each, of which the first num_groups count, those of the largest K first:
//       a_maps, b_maps  of the group's [m, K] and [n, K]: boxes of 128 rows of A; boxes of 176 rows of B, n as
//                       [n / 16, 2, 8] whose last two dimensions change places
//       k_blocks, first_k_blocks, indices  K / 128; the groups' K blocks before it in the scales; its place in C and D
//       a_scales  float32, (row, k block) at row + k * a_scale_k_stride; b_scales  the same
//       c         float32 [.., m, n], may be d
// Out:  d         float32 [.., m, n]
//
// Grid: any number of thread blocks, one per SM; each computes every gridDim.x-th tile.
#include "device/add_to_memory.cuh"
#include "device/wgmma.cuh"
#include "pipeline/producer.cuh"
#include "pipeline/stages.cuh"

constexpr int kBlockM = 128, kBlockN = 176, kBlockK = 128;
constexpr int kMathWarpgroups = 2, kMathWarps = 4 * kMathWarpgroups, kWarpgroupM = kBlockM / kMathWarpgroups;
static_assert((kMathWarps + 4) * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // on average the launch's 168 per thread
constexpr int kOctet = 16, kOctets = kBlockN / kOctet;        // columns of which a thread has four
constexpr int kPanel = 8;  // columns of tiles that run at the same time, so that A is read from device memory once
using Accumulator = Fragment<kBlockN>;

template <int kRows>
struct A : PerStage<kRows, kRowOfTile, kSwizzleBytes> {};
template <int kRows>
struct B : PerStage<kRows, kRowOfTile, kSwizzleBytes> {};
template <int kCount>
struct Scales : PerStage<kCount, 4> {};  // of A, then of B
using SharedMemory = Stages<kAsManyAsFit, A<kBlockM>, B<kBlockN>, Scales<kBlockM + kBlockN>, Full<1>, Empty<1>>;
constexpr int kStages = SharedMemory::kStages;

struct TensorMaps {
    TensorMap of[GROUPS];
};
struct Ints {
    int of[GROUPS];
};

struct Operands {
    const TensorMaps &a, &b;
    const Ints &k_blocks, &first_k_blocks, &indices;
    const float *a_scales, *b_scales;
    int a_scale_k_stride, b_scale_k_stride, m, n, groups;
};

// The tiles of a thread block. Those of a panel of columns have consecutive indices, row after row.
struct Tiles {
    const int row_tiles, column_tiles;
    int index = blockIdx.x;
    int group, row, column;  // of the current one

    DEVICE Tiles(const Operands& in) : row_tiles(ceil_div(in.m, kBlockM)), column_tiles(ceil_div(in.n, kBlockN)) {}
    DEVICE bool next(int groups) {
        group = index / (row_tiles * column_tiles);
        const int in_group = index % (row_tiles * column_tiles);
        const int panel = in_group / (row_tiles * kPanel), in_panel = in_group % (row_tiles * kPanel);
        const int width = min(kPanel, column_tiles - panel * kPanel);
        row = in_panel / width * kBlockM, column = (panel * kPanel + in_panel % width) * kBlockN;
        index += gridDim.x;
        return group < groups;
    }
};

// ---- producer: one thread ------------------------------------------------------------------------------------------

DEVICE void load_tiles(SharedMemory shared, const Operands& in) {
    Ring<kStages> ring;
    for (Tiles tile(in); tile.next(in.groups);) {
        const TensorMap *a = &in.a.of[tile.group], *b = &in.b.of[tile.group];
        const i64 first = in.first_k_blocks.of[tile.group];
        const float* a_scales = in.a_scales + first * in.a_scale_k_stride + tile.row;
        const float* b_scales = in.b_scales + first * in.b_scale_k_stride + tile.column;
        const u32 a_scale_bytes = ceil_div(min(kBlockM, in.m - tile.row), 4) * 16;
        const u32 b_scale_bytes = min(kBlockN, in.n - tile.column) * 4;
        const u32 bytes = SharedMemory::kBytes<A> + SharedMemory::kBytes<B> + a_scale_bytes + b_scale_bytes;
        // The function has its own copies of the addresses: by reference, they cost instructions in the loop.
        auto fill = [&, a_scales, b_scales](int k, int stage, u32 full) mutable {
            barrier_arrive_expect(full, bytes);
            tma_load(shared.at<A>(stage, 0), a, full, k * kBlockK, tile.row);
            tma_load_4d(shared.at<B>(stage, 0), b, full, k * kBlockK, 0, 0, tile.column / kOctet);
            bulk_load(shared.at<Scales>(stage, 0), a_scales, full, a_scale_bytes);
            bulk_load(shared.at<Scales>(stage, kBlockM), b_scales, full, b_scale_bytes);
            a_scales += in.a_scale_k_stride, b_scales += in.b_scale_k_stride;
        };
        fill_stages<barrier_wait>(shared, ring, 0, in.k_blocks.of[tile.group], fill);
    }
}

// ---- math: two warpgroups ------------------------------------------------------------------------------------------

// Where a thread has column i of the four of an octet: B's row 2j + i of 16 is row j + 8i of the box.
DEVICE constexpr int element(int octet, int row, int i) { return octet * 8 + i % 2 * 4 + row * 2 + i / 2; }

DEVICE void add(const Accumulator& product, int octet, const float (&row_scale)[2], float4 scales, Accumulator& sum) {
    const float column_scale[] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i / 4, e = element(octet, row, i % 4);
        sum[e] += row_scale[row] * column_scale[i % 4] * product[e];
    }
}

DEVICE void multiply(SharedMemory shared, Ring<kStages>& ring, int k_blocks, int warpgroup, Accumulator& sum) {
    const int rows = warpgroup * kWarpgroupM, row = rows + warp_row(threadIdx.x) + lane_row(threadIdx.x);
    const int column = threadIdx.x % 4 * 4;
    clear(sum);
#pragma unroll 1
    for (int k = 0; k < k_blocks; ++k, ring.advance()) {
        const int stage = ring.stage;
        barrier_wait(shared.full(stage), ring.phase);
        const float row_scale[] = {load_shared_float(shared.at<Scales>(stage, row)),
                                   load_shared_float(shared.at<Scales>(stage, row + 8))};
        Accumulator product;
        wgmma_start(product, shared.at<A>(stage, rows), shared.at<B>(stage, 0));
        float4 column_scales[kOctets];
#pragma unroll
        for (int i = 0; i < kOctets; ++i)
            column_scales[i] = load_shared_float4(shared.at<Scales>(stage, kBlockM + i * kOctet + column));
        wgmma_finish(product);
        release(shared, stage);
#pragma unroll
        for (int i = 0; i < kOctets; ++i) add(product, i, row_scale, column_scales[i], sum);
    }
}

// Where c is d itself, memory adds, and nothing waits for it: each element is added to once, so that no order changes
// its bits.
DEVICE void store(const Operands& in, const float* c, float* d, const Tiles& tile, int warpgroup,
                  const Accumulator& sum) {
    const int first_row = tile.row + warpgroup * kWarpgroupM + warp_row(threadIdx.x) + lane_row(threadIdx.x);
    const int column = tile.column + threadIdx.x % 4 * 4;
    const i64 matrix = i64(in.indices.of[tile.group]) * in.m;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = first_row + row_offset(r);
        const i64 at = (matrix + row) * in.n + column;
        const int octets = row < in.m ? ceil_div(in.n - column, kOctet) : 0;
        auto value = [&](int i, int j) { return sum[element(i, r, j)]; };
        if (c == d) {
#pragma unroll
            for (int i = 0; i < kOctets; ++i) {
                const float4 v = make_float4(value(i, 0), value(i, 1), value(i, 2), value(i, 3));
                add_to_memory(d + at + i * kOctet, v, i < octets);
            }
        } else {
            float4 v[kOctets];
#pragma unroll
            for (int i = 0; i < kOctets; ++i)  // all in flight at once
                v[i] = i < octets ? *reinterpret_cast<const float4*>(c + at + i * kOctet) : float4{};
#pragma unroll
            for (int i = 0; i < kOctets; ++i)
                if (i < octets)
                    *reinterpret_cast<float4*>(d + at + i * kOctet) = make_float4(
                        v[i].x + value(i, 0), v[i].y + value(i, 1), v[i].z + value(i, 2), v[i].w + value(i, 3));
        }
    }
}

// ---- kernel --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    k_grouped_gemm(const __grid_constant__ TensorMaps a_maps, const __grid_constant__ TensorMaps b_maps,
                   const __grid_constant__ Ints k_blocks, const __grid_constant__ Ints first_k_blocks,
                   const __grid_constant__ Ints indices, const float* a_scales, int a_scale_k_stride,
                   const float* b_scales, int b_scale_k_stride, const float* c, float* d, int m, int n, int groups) {
    const SharedMemory shared{dynamic_shared_address()};
    init_barriers(shared, kStages, 1, kMathWarps);
    let_next_kernel_start();  // the op's next launch, whose groups are others
    const Operands in{a_maps,           b_maps, k_blocks, first_k_blocks, indices, a_scales, b_scales, a_scale_k_stride,
                      b_scale_k_stride, m,      n,        groups};
    const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
    if (warpgroup == kMathWarpgroups) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x != kMathWarps * kWarp) return;
        load_tiles(shared, in);
        wait_for_previous_kernel();  // then the next kernel follows both
        return;
    }
    increase_registers<kMathRegisters>();
    Ring<kStages> ring;
    for (Tiles tile(in); tile.next(groups);) {
        Accumulator sum;
        multiply(shared, ring, warp_uniform(k_blocks.of[tile.group]), warpgroup, sum);
        store(in, c, d, tile, warpgroup, sum);
    }
}
