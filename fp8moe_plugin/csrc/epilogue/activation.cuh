// The activation of the experts, SiLU(gate) * up: its arithmetic, and how it is applied to each layout of gate and up.
// Another activation is an edit of this file; a limit or a bias also comes through its callers, which quantize and
// store.
//
// The sums are rounded to bfloat16 first, SiLU and the product are each rounded to bfloat16, as in vLLM's kernels.
#pragma once
#include "device/common.cuh"

// x / (1 + e^-x), accurate to about 2^-20: this changes less than one bfloat16 result in 10,000.
DEVICE float silu(float x) {
    constexpr float kLog2E = 1.44269504f;
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -kLog2E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return x * inverse;
}

// The activation of two pairs of bfloat16 values.
DEVICE u32 activate(u32 gate, u32 up) {
    const float2 g = unpack_bf16x2(gate);
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pack_bf16x2(silu(g.x), silu(g.y))), "r"(up));
    return product;
}

// Gate and up projection have an accumulator each: elements 2 * pair and the next.
template <int kCount>
DEVICE u32 activate_pair(const float (&gate)[kCount], const float (&up)[kCount], int pair) {
    return activate(pack_bf16x2(gate[2 * pair], gate[2 * pair + 1]), pack_bf16x2(up[2 * pair], up[2 * pair + 1]));
}

// Gate and up projection of a channel are the two rows of one accumulator: elements of the pair's two columns.
template <int kCount>
DEVICE u32 activate_pair(const float (&sum)[kCount], int pair) {
    const float* s = sum + 4 * pair;
    return activate(pack_bf16x2(s[0], s[1]), pack_bf16x2(s[2], s[3]));
}

// Sums of four neighbouring channels of a token.
DEVICE uint2 activate_four(float4 gate, float4 up) {
    return make_uint2(activate(pack_bf16x2(gate.x, gate.y), pack_bf16x2(up.x, up.y)),
                      activate(pack_bf16x2(gate.z, gate.w), pack_bf16x2(up.z, up.w)));
}

// Eight neighbouring channels of a token that are bfloat16 already.
DEVICE uint4 activate_eight(uint4 gate, uint4 up) {
    return make_uint4(activate(gate.x, up.x), activate(gate.y, up.y), activate(gate.z, up.z), activate(gate.w, up.w));
}
