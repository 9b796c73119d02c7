// Quantization of one group of 128 channels to e4m3: its scale, and eight of its values.
// UE8M0: 1 rounds scales up to powers of two.
#ifndef FP8MOE_FP8_CUH
#define FP8MOE_FP8_CUH

constexpr float kFp8Max = 448.0f;
constexpr float kSmallestAmax = 1e-10f;  // keeps the scale of an all-zero group finite

// Floats from the scales of one group of channels to those of the next: the GEMMs copy 16 bytes at a time.
__device__ inline size_t scale_pitch(int rows) { return (rows + 3) / 4 * 4; }

// a / b, correctly rounded, from the correctly rounded 1 / b (Markstein, "Computation of elementary functions on the IBM
// RISC System/6000 processor", 1990). The exact quotient matters: vLLM divides too, and a product with the inverse gives
// one code in 3,000 another value. Not kept: the sign of a zero, and 0 where b is infinite (it is NaN).
__device__ inline float divide(float a, float b, float inverse) {
    const float quotient = __fmul_rn(a, inverse);
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// From the bits of the group's largest magnitude.
__device__ inline float group_scale(unsigned amax_bits) {
    const float amax = __uint_as_float(max(amax_bits, __float_as_uint(kSmallestAmax)));
    const float scale = divide(amax, kFp8Max, 1.0f / kFp8Max);
#if UE8M0
    constexpr unsigned kMantissa = 0x7FFFFF, kExponent = 0x7F800000;
    return __uint_as_float((__float_as_uint(scale) + kMantissa) & kExponent);
#else
    return scale;
#endif
}

__device__ inline uint2 quantize_eight(const float (&v)[8], float scale) {
    const float inverse = __frcp_rn(scale);
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = divide(v[i], scale, inverse);
    return make_uint2(pack_e4m3x4(c[0], c[1], c[2], c[3]), pack_e4m3x4(c[4], c[5], c[6], c[7]));
}

#endif
