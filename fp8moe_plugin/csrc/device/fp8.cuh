// Quantization of groups of 128 channels to e4m3.
// UE8M0: 1 rounds scales up to powers of two.
#pragma once
#include "device/common.cuh"

constexpr int kGroupLanes = 16;  // lanes that share a group: 16 x 8 bfloat16 = 128 channels
constexpr float kFp8Max = 448.0f;
constexpr float kSmallestAmax = 1e-10f;  // keeps the scale of an all-zero group finite

// The distance of K-major scales from one group of channels to the next, in floats: the GEMMs copy 16 bytes at a time.
DEVICE size_t scale_pitch(int rows) { return (rows + 3) / 4 * 4; }

// ---- the largest magnitude -----------------------------------------------------------------------------------------
// The bits of non-negative floats are ordered as the floats, NaN above all: integer maxima propagate NaN.

DEVICE u32 max_u16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

constexpr u32 kNoSigns = 0x7FFF7FFF;  // of two bfloat16 values

// The larger of two bfloat16 values without signs, as the bits of a float.
DEVICE u32 larger_of(u32 pair) { return max(pair << 16, pair & 0xFFFF0000); }

// The largest magnitude of eight bfloat16 values, as the bits of a float.
DEVICE u32 magnitude_bits(uint4 values) {
    return larger_of(max_u16x2(max_u16x2(values.x & kNoSigns, values.y & kNoSigns),
                               max_u16x2(values.z & kNoSigns, values.w & kNoSigns)));
}

// Maximum over the 16 lanes of a quantization group.
DEVICE u32 group_max(u32 value) {
#pragma unroll
    for (int offset = kGroupLanes / 2; offset > 0; offset /= 2)
        value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

// ---- scale and values ----------------------------------------------------------------------------------------------

// a / b, correctly rounded, from the correctly rounded 1 / b (Markstein, "Computation of elementary functions on the
// IBM RISC System/6000 processor", 1990). The exact quotient matters: vLLM divides, too, and multiplying by the
// inverse would change one code in 3,000. Unlike division, it loses the sign of zero and gives NaN for infinite b.
DEVICE float divide(float a, float b, float inverse) {
    const float quotient = __fmul_rn(a, inverse);
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// The scale of a group, from the bits of its largest magnitude.
DEVICE float group_scale(u32 amax_bits) {
    const float amax = __uint_as_float(max(amax_bits, __float_as_uint(kSmallestAmax)));
    const float scale = divide(amax, kFp8Max, 1.0f / kFp8Max);
#if UE8M0
    constexpr u32 kMantissa = 0x7FFFFF, kExponent = 0x7F800000;
    return __uint_as_float((__float_as_uint(scale) + kMantissa) & kExponent);
#else
    return scale;
#endif
}

DEVICE u16 pack_e4m3x2(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE u32 pack_e4m3x4(float a, float b, float c, float d) {
    return pack_e4m3x2(a, b) | static_cast<u32>(pack_e4m3x2(c, d)) << 16;
}

DEVICE uint2 quantize_eight(const float (&v)[8], float scale) {
    const float inverse = __frcp_rn(scale);
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = divide(v[i], scale, inverse);
    return make_uint2(pack_e4m3x4(c[0], c[1], c[2], c[3]), pack_e4m3x4(c[4], c[5], c[6], c[7]));
}

// The codes of two bfloat16 values, each with a scale and its correctly rounded inverse.
DEVICE u16 quantize_two(u32 values, const float (&scale)[2], const float (&inverse)[2]) {
    float2 v = unpack_bf16x2(values);
    return pack_e4m3x2(divide(v.x, scale[0], inverse[0]), divide(v.y, scale[1], inverse[1]));
}
DEVICE u16 quantize_two(u32 values, float scale, float inverse) {
    float2 v = unpack_bf16x2(values);
    return pack_e4m3x2(divide(v.x, scale, inverse), divide(v.y, scale, inverse));
}
