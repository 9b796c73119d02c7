// wgmma.mma_async m64nNk32, e4m3 x e4m3 into float32: D[64, N] (+)= A[64, 32] @ B[N, 32]^T, both from shared memory.
#pragma once
#include "ptx.cuh"

// The descriptor of an operand tile of rows of 128 bytes along K, 128-byte swizzled: groups of 8 rows stand 1024 bytes
// apart (PTX ISA, "matrix descriptor"). Only its low word depends on the address; 2 added to it are 32 bytes along K.
constexpr int kDescriptorStepK = 2;
DEVICE u32 wgmma_descriptor_low(u32 tile) {
    constexpr u32 kLeadingOffset = 1;  // not used by swizzled layouts
    return (tile & 0x3ffff) >> 4 | kLeadingOffset << 16;
}
DEVICE u64 wgmma_descriptor(u32 low) {
    constexpr u32 kHigh = 1024 >> 4 | 1u << 30;  // distance of row groups, 128-byte swizzle
    u64 descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "n"(kHigh));
    return descriptor;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Keeps the compiler from moving reads of an accumulator above the wait.
template <int kCount>
DEVICE void wgmma_results_ready(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)

DEVICE void wgmma(float (&d)[4], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3"
        "}, %4, %5, p, 1, 1; }"
        : OUT4(0)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
DEVICE void wgmma(float (&d)[8], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, %8, %9, p, 1, 1; }"
        : OUT4(0), OUT4(4)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
DEVICE void wgmma(float (&d)[16], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, %16, %17, p, 1, 1; }"
        : OUT16(0)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
DEVICE void wgmma(float (&d)[32], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1; }"
        : OUT16(0), OUT16(16)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
DEVICE void wgmma(float (&d)[64], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, p, 1, 1; }"
        : OUT16(0), OUT16(16), OUT16(32), OUT16(48)
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
#undef OUT16
#undef OUT4

// d = A[64, 128] @ B[N, 128]^T, between wgmma_fence and wgmma_commit.
template <int kCount>
DEVICE void wgmma_issue(float (&d)[kCount], u32 a_tile, u32 b_tile) {
    u32 a = wgmma_descriptor_low(a_tile), b = wgmma_descriptor_low(b_tile);
#pragma unroll
    for (int step = 0; step < 4 * kDescriptorStepK; step += kDescriptorStepK)
        wgmma(d, wgmma_descriptor(a + step), wgmma_descriptor(b + step), step > 0);
}

// The same, complete when this returns.
template <int kCount>
DEVICE void wgmma_k128(float (&d)[kCount], u32 a_tile, u32 b_tile) {
    wgmma_fence();
    wgmma_issue(d, a_tile, b_tile);
    wgmma_commit();
    wgmma_wait();
    wgmma_results_ready(d);
}
