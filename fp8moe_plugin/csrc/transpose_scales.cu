// Copies scales of rows to the layout of the GEMMs, in which the rows of each K block are contiguous.
//
// In:   scales   float32; K block k of row r of group g at g * group_stride + r * row_stride + k
//       counts   int32 [G]; rows from counts[g] on are neither read nor written
// Out:  out      float32, at g * out_group_stride + k * out_k_stride + r
//
// Grid: (k_tiles * any, G): blocks of a group share its tiles. A warp reads 32 K blocks of a row, and writes 32
// rows of a K block; in between, the tile is in shared memory.
#include "device/common.cuh"

constexpr int kTileRows = SCALE_TILE_ROWS, kTileK = SCALE_TILE_K;
static_assert(kTileK == kWarp, "a lane reads one K block of a row");
constexpr int kPitch = kTileRows + 1, kTile = kTileK * kPitch;  // in shared memory; lanes write to different banks
constexpr int kWarps = THREADS / kWarp;

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_scales(const float* __restrict__ scales, const int* __restrict__ counts, float* __restrict__ out,
                     int group_stride, int row_stride, int out_group_stride, int out_k_stride, int rows, int k_blocks) {
    __shared__ float tile[kTile];
    const int group = blockIdx.y, warp = threadIdx.x / kWarp, lane = lane_of_warp();
    const int count = min(counts[group], rows);
    const int k_tiles = ceil_div(k_blocks, kTileK);
    const int first_k = blockIdx.x % k_tiles * kTileK;
    scales += static_cast<size_t>(group) * group_stride + first_k;
    out += static_cast<size_t>(group) * out_group_stride + static_cast<size_t>(first_k) * out_k_stride;

    for (int first = blockIdx.x / k_tiles * kTileRows; first < count; first += gridDim.x / k_tiles * kTileRows) {
        // Read rows.
#pragma unroll
        for (int row = warp; row < kTileRows; row += kWarps)
            if (first + row < count && first_k + lane < k_blocks)
                tile[lane * kPitch + row] = scales[static_cast<size_t>(first + row) * row_stride + lane];
        __syncthreads();

        // Write K blocks.
#pragma unroll
        for (int k = warp; k < kTileK; k += kWarps)
#pragma unroll
            for (int row = lane; row < kTileRows; row += kWarp)
                if (first + row < count && first_k + k < k_blocks)
                    out[static_cast<size_t>(k) * out_k_stride + first + row] = tile[k * kPitch + row];
        __syncthreads();  // the next tile is written to the same memory
    }
}
