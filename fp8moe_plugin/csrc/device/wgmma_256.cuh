// The widest wgmma, of 256 columns: its accumulator takes 128 registers of a thread.
#pragma once
#include "device/wgmma.cuh"

#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT8(i) OUT4(i), OUT4(i + 4)
#define NAMES_112 NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_128 NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define OUTS_128 OUTS_96, OUT8(96), OUT8(104), OUT8(112), OUT8(120)

DEVICE void wgmma(float (&d)[128], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" NAMES_128 "}, %128, %129, p, 1, 1; }"
        : OUTS_128
        : "l"(a), "l"(b), "r"(int(accumulate)));
}
#undef OUT8
#undef OUT4
