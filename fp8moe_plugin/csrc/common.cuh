// Helpers shared by all kernels: integer division, packed conversions, reductions within a warp and a CTA.
#ifndef FP8MOE_COMMON_CUH
#define FP8MOE_COMMON_CUH

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int kGroupLanes = 16;  // lanes that share a quantization group: 16 x 8 bfloat16 = 128 channels

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ inline int lane_of_warp() { return threadIdx.x % kWarp; }

// ---- packed conversions; element 0 is in the low half ----

__device__ inline float2 unpack_bf16x2(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
}

__device__ inline unsigned pack_bf16x2(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float round_bf16(float value) { return unpack_bf16x2(pack_bf16x2(value, 0.0f)).x; }

__device__ inline void unpack_eight(uint4 bf16, float (&v)[8]) {
    const unsigned pairs[4] = {bf16.x, bf16.y, bf16.z, bf16.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16x2(pairs[i]);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

__device__ inline unsigned pack_e4m3x4(float a, float b, float c, float d) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | static_cast<unsigned>(high) << 16;
}

// ---- maxima of magnitudes ----
// The bits of non-negative floats order like the floats, with NaN above them all: integer maxima keep NaN.

__device__ inline unsigned magnitude_bits(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

__device__ inline unsigned max_u16x2(unsigned a, unsigned b) {
    unsigned larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Bits of the largest magnitude of eight bfloat16 values, as a float.
__device__ inline unsigned magnitude_bits(uint4 values) {
    constexpr unsigned kNoSigns = 0x7FFF7FFF;
    const unsigned pair = max_u16x2(max_u16x2(values.x & kNoSigns, values.y & kNoSigns),
                                    max_u16x2(values.z & kNoSigns, values.w & kNoSigns));
    return max(pair << 16, pair & 0xFFFF0000);
}

// Maximum over the 16 lanes of a quantization group.
__device__ inline unsigned group_max(unsigned value) {
#pragma unroll
    for (int offset = kGroupLanes / 2; offset > 0; offset /= 2)
        value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

// ---- scan ----

// Sum of `value` over the threads before this one; `total` gets the sum over all. All threads of the CTA call it.
template <int kThreads>
__device__ inline int exclusive_scan(int value, int& total) {
    constexpr int kWarps = kThreads / kWarp;
    static_assert(kThreads % kWarp == 0 && kWarps <= kWarp, "one warp scans the sums of all");
    __shared__ int warp_ends[kWarps];
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp();

    int inclusive = value;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int before = __shfl_up_sync(kAllLanes, inclusive, offset);
        inclusive += lane >= offset ? before : 0;
    }
    if (lane == kWarp - 1) warp_ends[warp] = inclusive;
    __syncthreads();

    if (warp == 0) {
        int end = lane < kWarps ? warp_ends[lane] : 0;
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const int before = __shfl_up_sync(kAllLanes, end, offset);
            end += lane >= offset ? before : 0;
        }
        if (lane < kWarps) warp_ends[lane] = end;
    }
    __syncthreads();

    total = warp_ends[kWarps - 1];
    const int exclusive = inclusive - value + (warp == 0 ? 0 : warp_ends[warp - 1]);
    __syncthreads();  // the next call overwrites warp_ends
    return exclusive;
}

#endif
