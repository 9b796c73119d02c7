// Additions by memory: fire and forget.
#pragma once
#include "device/common.cuh"

// If `there`, adds four floats to those at a multiple of 16 bytes. Subnormal sums become zero.
DEVICE void add_to_memory(float* to, float4 v, bool there) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n"
        "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(int(there))
        : "memory");
}
