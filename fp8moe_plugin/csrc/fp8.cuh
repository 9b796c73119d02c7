// Quantization of one group of 128 channels to e4m3: its scale, and eight of its values.
// UE8M0: 1 rounds scales up to powers of two.
#ifndef FP8MOE_FP8_CUH
#define FP8MOE_FP8_CUH

constexpr float kFp8Max = 448.0f;
constexpr float kSmallestAmax = 1e-10f;  // keeps the scale of an all-zero group finite

struct GroupScale {
    float scale;    // value = code * scale
    float inverse;  // code = value * inverse
};

// From the bits of the group's largest magnitude; IEEE divisions, so that every implementation gets the same bits.
__device__ inline GroupScale group_scale(unsigned amax_bits) {
    const float amax = __uint_as_float(max(amax_bits, __float_as_uint(kSmallestAmax)));
    const float scale = __fdiv_rn(amax, kFp8Max);
#if UE8M0
    constexpr unsigned kMantissa = 0x7FFFFF, kExponent = 0x7F800000;
    const float power = __uint_as_float((__float_as_uint(scale) + kMantissa) & kExponent);
    return {power, __fdiv_rn(1.0f, power)};
#else
    return {scale, __fdiv_rn(kFp8Max, amax)};
#endif
}

__device__ inline uint2 quantize_eight(const float (&v)[8], float inverse) {
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = __fmul_rn(v[i], inverse);
    return make_uint2(pack_e4m3x4(c[0], c[1], c[2], c[3]), pack_e4m3x4(c[4], c[5], c[6], c[7]));
}

#endif
