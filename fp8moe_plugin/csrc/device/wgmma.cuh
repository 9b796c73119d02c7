// wgmma.mma_async m64nNk32, e4m3 x e4m3 into float32: D[64, N] (+)= A[64, 32] @ B[N, 32]^T, both from shared memory,
// or A from registers.
#pragma once
#include "device/fragment.cuh"
#include "device/ptx.cuh"

// The descriptor of an operand tile whose rows are 128 bytes along K, 128-byte swizzled: groups of 8 rows are 1024
// bytes apart (PTX ISA, "matrix descriptor"). Only the low word depends on the address; adding 2 advances 32 bytes
// along K.
constexpr int kDescriptorStepK = 2;
DEVICE u32 wgmma_descriptor_low(u32 tile) {
    constexpr u32 kLeadingOffset = 1;  // ignored for swizzled layouts
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
// For all groups but the last.
DEVICE void wgmma_wait_for_earlier() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// Keeps the compiler from moving reads of an accumulator above the wait.
template <int kCount>
DEVICE void wgmma_results_ready(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kBlocks, int kCount>
DEVICE void wgmma_results_ready(float (&d)[kBlocks][kCount]) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) wgmma_results_ready(d[i]);
}

// An accumulator's registers: their names in PTX, and the operands.
#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT8(i) OUT4(i), OUT4(i + 4)
#define NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_12 NAMES_8 ",%8,%9,%10,%11"
#define NAMES_16 NAMES_12 ",%12,%13,%14,%15"
#define NAMES_20 NAMES_16 ",%16,%17,%18,%19"
#define NAMES_24 NAMES_20 ",%20,%21,%22,%23"
#define NAMES_32 NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_40 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_48 NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_56 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_64 NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_72 NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NAMES_80 NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_88 NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define NAMES_96 NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define OUTS_8 OUT8(0)
#define OUTS_12 OUTS_8, OUT4(8)
#define OUTS_16 OUTS_8, OUT8(8)
#define OUTS_20 OUTS_16, OUT4(16)
#define OUTS_24 OUTS_16, OUT8(16)
#define OUTS_32 OUTS_24, OUT8(24)
#define OUTS_40 OUTS_32, OUT8(32)
#define OUTS_48 OUTS_40, OUT8(40)
#define OUTS_56 OUTS_48, OUT8(48)
#define OUTS_64 OUTS_56, OUT8(56)
#define OUTS_72 OUTS_64, OUT8(64)
#define OUTS_80 OUTS_72, OUT8(72)
#define OUTS_88 OUTS_80, OUT8(80)
#define OUTS_96 OUTS_88, OUT8(88)

// For n columns: the accumulator, and the names of the operands after it, two descriptors and whether to accumulate.
#define WGMMA(n, names, outs, a_name, b_name, accumulate_name)                                                   \
    DEVICE void wgmma(float (&d)[n / 2], u64 a, u64 b, bool accumulate) {                                        \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate_name                                           \
                     ", 0;\n"                                                                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" names "}, " a_name ", " b_name \
                     ", p, 1, 1; }"                                                                              \
                     : outs                                                                                      \
                     : "l"(a), "l"(b), "r"(int(accumulate)));                                                    \
    }
WGMMA(8, "%0,%1,%2,%3", OUT4(0), "%4", "%5", "%6")
WGMMA(16, NAMES_8, OUTS_8, "%8", "%9", "%10")
WGMMA(32, NAMES_16, OUTS_16, "%16", "%17", "%18")
WGMMA(64, NAMES_32, OUTS_32, "%32", "%33", "%34")
WGMMA(96, NAMES_48, OUTS_48, "%48", "%49", "%50")
WGMMA(112, NAMES_56, OUTS_56, "%56", "%57", "%58")
WGMMA(128, NAMES_64, OUTS_64, "%64", "%65", "%66")
WGMMA(144, NAMES_72, OUTS_72, "%72", "%73", "%74")
WGMMA(160, NAMES_80, OUTS_80, "%80", "%81", "%82")
WGMMA(176, NAMES_88, OUTS_88, "%88", "%89", "%90")
WGMMA(192, NAMES_96, OUTS_96, "%96", "%97", "%98")
#undef WGMMA

// The same with A in registers: of each row of the thread four channels, and four 16 channels further on. Their names
// follow those of the accumulator.
struct RegistersA {
    u32 row[4][4];  // by 32 channels; the thread's two rows, then both 16 channels further on
};
#define WGMMA_A_IN_REGISTERS(n, names, outs, a_names, b_name, accumulate_name)                                      \
    DEVICE void wgmma(float (&d)[n / 2], const u32(&a)[4], u64 b, bool accumulate) {                                \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate_name                                              \
                     ", 0;\n"                                                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" names "}, {" a_names "}, " b_name \
                     ", p, 1, 1; }"                                                                                 \
                     : outs                                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                   \
    }
WGMMA_A_IN_REGISTERS(8, "%0,%1,%2,%3", OUT4(0), "%4,%5,%6,%7", "%8", "%9")
WGMMA_A_IN_REGISTERS(16, NAMES_8, OUTS_8, "%8,%9,%10,%11", "%12", "%13")
WGMMA_A_IN_REGISTERS(24, NAMES_12, OUTS_12, "%12,%13,%14,%15", "%16", "%17")
WGMMA_A_IN_REGISTERS(32, NAMES_16, OUTS_16, "%16,%17,%18,%19", "%20", "%21")
WGMMA_A_IN_REGISTERS(40, NAMES_20, OUTS_20, "%20,%21,%22,%23", "%24", "%25")
WGMMA_A_IN_REGISTERS(48, NAMES_24, OUTS_24, "%24,%25,%26,%27", "%28", "%29")
WGMMA_A_IN_REGISTERS(64, NAMES_32, OUTS_32, "%32,%33,%34,%35", "%36", "%37")
#undef WGMMA_A_IN_REGISTERS
#undef OUT8
#undef OUT4

// d = A[64, 128] @ B[N, 128]^T, between wgmma_fence and wgmma_commit. The first one takes the low words of descriptors,
// and multiplies the quarters of K from kFirst to kEnd.
template <int kFirst = 0, int kEnd = 4, int kCount>
DEVICE void wgmma_issue_described(float (&d)[kCount], u32 a, u32 b) {
#pragma unroll
    for (int step = kFirst * kDescriptorStepK; step < kEnd * kDescriptorStepK; step += kDescriptorStepK)
        wgmma(d, wgmma_descriptor(a + step), wgmma_descriptor(b + step), step > 0);
}
template <int kCount>
DEVICE void wgmma_issue(float (&d)[kCount], u32 a_tile, u32 b_tile) {
    wgmma_issue_described(d, wgmma_descriptor_low(a_tile), wgmma_descriptor_low(b_tile));
}
// Before the fence.
DEVICE void wgmma_registers_written(RegistersA& a) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a.row[step][i])::"memory");
}
// With the fence: for one or several products of the same A, whose registers were written before.
template <int kCount>
DEVICE void wgmma_issue_written(float (&d)[kCount], const RegistersA& a, u32 b_tile, bool accumulate = false) {
    const u32 b = wgmma_descriptor_low(b_tile);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        wgmma(d, a.row[step], wgmma_descriptor(b + step * kDescriptorStepK), step > 0 || accumulate);
}
template <int kCount>
DEVICE void wgmma_issue(float (&d)[kCount], RegistersA a, u32 b_tile) {
    wgmma_registers_written(a);
    wgmma_issue_written(d, a, b_tile);
}

// The product `d` of one K block, for a main loop that does something else while the tensor cores work:
//
//       wgmma_start(d, a_tile, b_tile);  ...  wgmma_finish(d);
template <int kCount, class Tile>
DEVICE void wgmma_start(float (&d)[kCount], const Tile& a_tile, u32 b_tile) {
    wgmma_fence();
    wgmma_issue(d, a_tile, b_tile);
    wgmma_commit();
}
template <class Product>
DEVICE void wgmma_finish(Product& d) {
    wgmma_wait();
    wgmma_results_ready(d);
}
