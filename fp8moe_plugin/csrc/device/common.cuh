// Shared by all kernels: type names, integer division, programmatic dependent launch, conversions, a scan.
#pragma once

#define DEVICE __device__ __forceinline__

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr int kWarp = 32;
constexpr u32 kAllLanes = 0xFFFFFFFF;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE int lane_of_warp() { return threadIdx.x % kWarp; }

// ---- programmatic dependent launch (PDL); set per launch in Python -------------------------------------------------
//
// A kernel launched with PDL starts once every block of the previous kernel has called let_next_kernel_start or has
// ended. It may then run concurrently with all earlier kernels, back to the last one launched without PDL.
// wait_for_previous_kernel returns when the previous kernel has ended and its writes are visible. At least one block of
// every kernel launched with PDL calls it before it ends, so that a kernel launched without PDL follows all of them.
//
// Before it returns, a kernel must not read what an earlier kernel may still write, and must not let a kernel start
// that would read it. Kernels of a layer write no weights, so all but its first may load weights before they wait. What
// ran before a layer is unknown, as engines write weights when they reload them, wake up or rebalance experts: its
// first kernel is launched without PDL, or waits before it does anything else. That takes for granted that the kernels
// of others, too, wait where they are launched with PDL.

DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- packed conversions; element 0 is in the low half --------------------------------------------------------------

DEVICE float2 unpack_bf16x2(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
}

DEVICE float bf16_value(u16 bits) { return __uint_as_float(u32(bits) << 16); }

DEVICE u16 bf16_bits(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u32 pack_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE void unpack_eight(uint4 bf16, float (&v)[8]) {
    const u32 pairs[4] = {bf16.x, bf16.y, bf16.z, bf16.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_bf16x2(pairs[i]);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

// ---- scan ----------------------------------------------------------------------------------------------------------

// Exclusive prefix sums over the threads of a block, of several values at once; `all` gets the totals. Only the first
// `warps` warps have values and get sums. All threads of the block call it, and meet before they call it again.
template <int kValues>
DEVICE void exclusive_scan(const int (&value)[kValues], int warps, int (&before)[kValues], int (&all)[kValues]) {
    constexpr int kSums = kValues * kWarp;
    __shared__ int sums[kSums];  // of warps
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp();
    int inclusive[kValues];
    if (warp < warps) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            inclusive[i] = value[i];
#pragma unroll
            for (int offset = 1; offset < kWarp; offset *= 2) {
                const int other = __shfl_up_sync(kAllLanes, inclusive[i], offset);
                inclusive[i] += lane >= offset ? other : 0;
            }
            if (lane == kWarp - 1) sums[i * kWarp + warp] = inclusive[i];
        }
    }
    __syncthreads();
    if (warp < warps) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {  // in every warp, which saves a barrier
            const int sum = lane < warps ? sums[i * kWarp + lane] : 0;
            before[i] = inclusive[i] - value[i] + __reduce_add_sync(kAllLanes, lane < warp ? sum : 0);
            all[i] = __reduce_add_sync(kAllLanes, sum);
        }
    }
}
