// The memory traffic of GEMM 2 and combine in column panels, without the arithmetic: an upper bound of what one kernel
// could reach: docs/experiments/052-column-panels.md
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -o /tmp/panel_traffic 052-panel-traffic.cu && /tmp/panel_traffic
#include <cuda_bf16.h>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#define CHECK(x)                                           \
    do {                                                   \
        cudaError_t e = (x);                               \
        if (e != cudaSuccess) {                            \
            printf("%s: %s\n", #x, cudaGetErrorString(e)); \
            exit(1);                                       \
        }                                                  \
    } while (0)
using u32 = uint32_t;
using u64 = uint64_t;
constexpr int kExperts = 256, kK = 256, kN = 7168, kTopk = 8, kRowsTile = 128, kSMs = 132, kStages = 3;

struct Args {
    const char *a, *w;                                    // [R, K], [E, N, K]
    char* ring;                                           // [slots, R, P] bf16
    const int* rows;                                      // [T, 8]
    char* out;                                            // [T, N] bf16
    int *done, *combined;                                 // [panels]
    int tokens, tiles, run, slots, store, combine, load;  // run: row tiles of an expert that share weights
};

__device__ u32 smem(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ void init(u64* b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem(b)), "r"(n)); }
__device__ void expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem(b)), "r"(bytes) : "memory");
}
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem(b)) : "memory"); }
__device__ void wait(u64* b, u32 phase) {
    asm volatile(
        "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(
            smem(b)),
        "r"(phase)
        : "memory");
}
__device__ u64 policy(bool first) {
    u64 p;
    if (first)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    else
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}
__device__ void load(void* to, const char* from, u32 bytes, u64* b, u64 hint) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(smem(to)),
        "l"(from), "r"(bytes), "r"(smem(b)), "l"(hint)
        : "memory");
}
__device__ void store(char* to, const void* from, u32 bytes, u64 hint) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\ncp.async.bulk.commit_group;" ::
            "l"(to),
        "r"(smem(from)), "r"(bytes), "l"(hint)
        : "memory");
}
__device__ int acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ void release(int* p) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p) : "memory"); }
__device__ void wait_for(const int* p, int value) {
    while (acquire(p) < value) __nanosleep(100);
}

template <int P>
__global__ void __launch_bounds__(1024, 1) traffic(Args x) {
    constexpr int kPanels = kN / P, kBytesA = kRowsTile * kK / 2, kBytesB = P * kK / 2, kBytesOut = kRowsTile * P * 2;
    extern __shared__ __align__(128) char shared[];
    char* staging = shared + kStages * (kBytesA + kBytesB);
    __shared__ u64 full[kStages], empty[kStages];
    constexpr int kMostTokens = 128;
    __shared__ int slots[kMostTokens * kTopk], arrived[kN / 128];
    const int mine = (x.tokens - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);  // tokens b, b + grid, ..
    for (int i = threadIdx.x; i < mine * kTopk; i += blockDim.x)
        slots[i] = x.rows[(blockIdx.x + i / kTopk * gridDim.x) * kTopk + i % kTopk];
    if (threadIdx.x < kN / 128) arrived[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) init(&full[s], 1), init(&empty[s], 1);
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, runs = x.tiles / x.run, total = kPanels * runs;
    const size_t rows = size_t(x.tiles) * kRowsTile;
    if (warp == 0) {
        if (lane || !x.load) return;
        const u64 stream = policy(true), keep = policy(false);
        int s = 0;
        u32 phase = 0;
        for (int t = blockIdx.x; t < total; t += gridDim.x) {
            const int panel = t / runs, first = t % runs * x.run, expert = int(size_t(first) * kExperts / x.tiles);
            for (int i = 0; i < x.run; ++i)
                for (int k = 0; k < 2; ++k) {
                    wait(&empty[s], phase ^ 1);
                    char* stage = shared + s * (kBytesA + kBytesB);
                    expect(&full[s], kBytesA + (i == 0 ? kBytesB : 0));
                    load(stage, x.a + size_t(first + i) * 2 * kBytesA + k * kBytesA, kBytesA, &full[s], keep);
                    if (i == 0)
                        load(stage + kBytesA, x.w + (size_t(expert) * kN + panel * P) * kK + k * kBytesB, kBytesB,
                             &full[s], stream);
                    if (++s == kStages) s = 0, phase ^= 1;
                }
        }
    } else if (warp == 1) {
        if (lane) return;
        const u64 keep = policy(false), stream = policy(true);
        int s = 0, before = -1;
        u32 phase = 0;
        for (int t = blockIdx.x; t < total; t += gridDim.x) {
            const int panel = t / runs, first = t % runs * x.run;
            if (x.store && x.combine && panel >= x.slots) wait_for(x.combined + panel - x.slots, gridDim.x);
            for (int i = 0; i < x.run; ++i) {
                for (int k = 0; k < 2 && x.load; ++k) {
                    wait(&full[s], phase);
                    arrive(&empty[s]);
                    if (++s == kStages) s = 0, phase ^= 1;
                }
                if (!x.store) continue;
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                store(x.ring + (size_t(panel % x.slots) * rows + size_t(first + i) * kRowsTile) * P * 2, staging,
                      kBytesOut, x.combine ? keep : stream);
                if (before >= 0) {
                    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
                    release(x.done + before);
                }
                before = panel;
            }
        }
        if (before >= 0) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            release(x.done + before);
        }
    } else if (x.combine) {
        constexpr int kLanes = P * 2 / 16, kAtOnce = 32 / kLanes * 2;  // lanes per row; tokens of a warp at once
        const int warps = blockDim.x / 32 - 2;
        for (int panel = 0; panel < kPanels; ++panel) {
            if (x.store) wait_for(x.done + panel, x.tiles);
            const char* ring = x.ring + size_t(panel % x.slots) * rows * P * 2 + lane % kLanes * 16;
            for (int i = (warp - 2) * kAtOnce + lane / kLanes; i < mine; i += warps * kAtOnce) {
                uint4 value[2][kTopk];
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int j = 0; j < kTopk; ++j) {
                        const int t = min(i + h * (32 / kLanes), mine - 1);
                        value[h][j] =
                            __ldcg(reinterpret_cast<const uint4*>(ring + size_t(slots[t * kTopk + j]) * P * 2));
                    }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum[8] = {};
#pragma unroll
                    for (int j = 0; j < kTopk; ++j) {
                        const __nv_bfloat162* v = reinterpret_cast<const __nv_bfloat162*>(&value[h][j]);
                        for (int c = 0; c < 4; ++c)
                            sum[2 * c] += __low2float(v[c]), sum[2 * c + 1] += __high2float(v[c]);
                    }
                    uint4 packed;
                    __nv_bfloat162* v = reinterpret_cast<__nv_bfloat162*>(&packed);
                    for (int c = 0; c < 4; ++c) v[c] = __floats2bfloat162_rn(sum[2 * c], sum[2 * c + 1]);
                    if (i + h * (32 / kLanes) >= mine) continue;
                    const size_t t = blockIdx.x + size_t(i + h * (32 / kLanes)) * gridDim.x;
                    __stcs(reinterpret_cast<uint4*>(x.out + (t * kN + panel * P) * 2 + lane % kLanes * 16), packed);
                }
            }
            __syncwarp();
            if (lane == 0 && x.store && atomicAdd(&arrived[panel], 1) == warps - 1) release(x.combined + panel);
        }
    }
}

template <int P>
float us(Args x, int warps) {
    const int bytes = kStages * (kRowsTile * kK / 2 + P * kK / 2) + kRowsTile * P * 2;
    CHECK(cudaFuncSetAttribute(traffic<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    std::vector<float> times;
    for (int i = 0; i < 12; ++i) {
        CHECK(cudaMemsetAsync(x.done, 0, 4 * 1024));
        cudaEventRecord(begin);
        traffic<P><<<kSMs, 32 * (2 + warps), bytes>>>(x);
        cudaEventRecord(end);
        CHECK(cudaDeviceSynchronize());
        float ms;
        cudaEventElapsedTime(&ms, begin, end);
        if (i >= 2) times.push_back(ms * 1000);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

template <int P>
void measure(Args x) {
    x.load = x.store = x.combine = 0;
    Args loads = x, gemm = x, sums = x, stores = x;
    loads.slots = gemm.slots = sums.slots = stores.slots = kN / P;
    loads.load = gemm.load = gemm.store = sums.combine = stores.store = 1;
    printf("%6d tokens, panels of %d: loads %.0f, stores %.0f, GEMM 2 %.0f, combine %.0f |", x.tokens, P,
           us<P>(loads, 1), us<P>(stores, 1), us<P>(gemm, 1), us<P>(sums, 30));
    for (int slots : {2, 3, 4})
        for (int warps : {3, 8, 16}) {
            Args ring = x;
            ring.load = ring.store = ring.combine = 1, ring.slots = slots;
            printf(" %d/%d %.0f", slots, warps, us<P>(ring, warps));
        }
    printf("\n");
}

int main(int argc, char**) {
    const bool one = argc > 1;  // for ncu
    cudaDeviceProp gpu;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    printf("%s, L2 %d MB. us; the ring: slots/combining warps per SM and us\n", gpu.name, gpu.l2CacheSize >> 20);
    for (int tokens : {4096, 8192, 16384}) {
        Args x{};
        x.tokens = tokens, x.tiles = tokens * kTopk / kRowsTile, x.run = std::min(x.tiles / kExperts, 2);
        const size_t rows = size_t(tokens) * kTopk;
        std::vector<int> order(rows);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(0));
        char *a, *w, *ring, *out, *slots, *counters;
        CHECK(cudaMalloc(&a, rows * kK));
        CHECK(cudaMalloc(&w, size_t(kExperts) * kN * kK));
        CHECK(cudaMalloc(&ring, rows * kN * 2));
        CHECK(cudaMalloc(&out, size_t(tokens) * kN * 2));
        CHECK(cudaMalloc(&slots, rows * 4));
        CHECK(cudaMalloc(&counters, 4 * 1024));
        CHECK(cudaMemset(w, 1, size_t(kExperts) * kN * kK));
        CHECK(cudaMemset(a, 1, rows * kK));
        CHECK(cudaMemset(ring, 0, rows * kN * 2));
        CHECK(cudaMemcpy(slots, order.data(), rows * 4, cudaMemcpyHostToDevice));
        x.a = a, x.w = w, x.ring = ring, x.out = out, x.rows = reinterpret_cast<int*>(slots);
        x.done = reinterpret_cast<int*>(counters), x.combined = x.done + 512;
        if (one) {
            x.load = x.store = x.combine = 1, x.slots = 3;
            us<256>(x, 8), us<128>(x, 8);
            x.combine = 0, x.slots = kN / 256, us<256>(x, 1);
            x.combine = 1, x.load = x.store = 0, us<256>(x, 30);
            return 0;
        }
        measure<256>(x);
        measure<128>(x);
        for (char* p : {a, w, ring, out, slots, counters}) cudaFree(p);
    }
}
