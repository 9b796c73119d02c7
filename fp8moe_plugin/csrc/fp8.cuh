// Quantization of one group of 128 channels to e4m3: its scale, and eight of its values.
// UE8M0: 1 rounds scales up to powers of two.
#ifndef FP8MOE_FP8_CUH
#define FP8MOE_FP8_CUH

constexpr float kFp8Max = 448.0f;
constexpr float kSmallestAmax = 1e-10f;  // keeps the scale of an all-zero group finite

// From the bits of the group's largest magnitude.
__device__ inline float group_scale(unsigned amax_bits) {
    const float amax = __uint_as_float(max(amax_bits, __float_as_uint(kSmallestAmax)));
    const float scale = __fdiv_rn(amax, kFp8Max);
#if UE8M0
    constexpr unsigned kMantissa = 0x7FFFFF, kExponent = 0x7F800000;
    return __uint_as_float((__float_as_uint(scale) + kMantissa) & kExponent);
#else
    return scale;
#endif
}

// Both divisions are IEEE divisions, as in vLLM: a product with the inverse gives one code in 3,000 another value.
__device__ inline uint2 quantize_eight(const float (&v)[8], float scale) {
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = __fdiv_rn(v[i], scale);
    return make_uint2(pack_e4m3x4(c[0], c[1], c[2], c[3]), pack_e4m3x4(c[4], c[5], c[6], c[7]));
}

#endif
