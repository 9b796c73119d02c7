// SiLU(gate) * up, quantized to e4m3 with a float32 scale per row and group of 128 channels. The
// roundings of the activation are those of vLLM's kernels, so that switching backends changes as few codes as possible.
//
// In:   gate_up  bfloat16 [G, max_m, 2 * I], gate channels first; I = 128 * groups
//       counts   int32 [G]; rows from counts[g] on are neither read nor written
// Out:  q        e4m3 [G * max_m, I]
//       scales   float32 [groups, G * max_m], at scale_pitch(G * max_m)
//
// UE8M0: 1 rounds scales up to powers of two.    Grid: (any, G); the thread blocks of an expert share its rows.
// A half-warp processes a group, 16 bytes per lane, of four rows, as in quantize.cu.
#include "device/common.cuh"
#include "device/fp8.cuh"
#include "epilogue/activation.cuh"

constexpr int kRowsPerWarp = ROWS_PER_WARP;
constexpr int kRowsPerLane = kRowsPerWarp / (kWarp / kGroupLanes);
constexpr int kWarps = THREADS / kWarp;

extern "C" __global__ void __launch_bounds__(THREADS)
    silu_mul_quant(const uint4* __restrict__ gate_up, const int* __restrict__ counts, uint2* __restrict__ q,
                   float* __restrict__ scales, int max_m, int groups, Activation activation) {
    const int count = min(counts[blockIdx.y], max_m);
    const int row_begin = blockIdx.y * max_m;
    const int row_end = row_begin + count;
    const int units = ceil_div(max(count, 0), kRowsPerWarp) * groups;
    const int lane = threadIdx.x % kGroupLanes;

    for (int unit = blockIdx.x * kWarps + threadIdx.x / kWarp; unit < units; unit += gridDim.x * kWarps) {
        const int group = unit % groups;
        const int first = row_begin + unit / groups * kRowsPerWarp + lane_of_warp() / kGroupLanes * kRowsPerLane;

        // Load.
        uint4 gate[kRowsPerLane], up[kRowsPerLane];
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            gate[i] = up[i] = make_uint4(0, 0, 0, 0);
            if (first + i < row_end) {
                const uint4* const row = gate_up + static_cast<size_t>(first + i) * 2 * groups * kGroupLanes;
                gate[i] = row[group * kGroupLanes + lane];
                up[i] = row[(groups + group) * kGroupLanes + lane];
            }
        }

        // Activate, quantize, store.
        float scale_of_lane = 0.0f;  // lane i stores the scale of row i, in one store
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) {
            const uint4 product = activation.of_eight(gate[i], up[i]);
            float value[8];
            unpack_eight(product, value);
            const float scale = group_scale(group_max(magnitude_bits(product)));
            if (lane == i) scale_of_lane = scale;
            if (first + i < row_end)
                q[(static_cast<size_t>(first + i) * groups + group) * kGroupLanes + lane] =
                    quantize_eight(value, scale);
        }
        if (lane < kRowsPerLane && first + lane < row_end)
            scales[group * scale_pitch(gridDim.y * max_m) + first + lane] = scale_of_lane;
    }
}
