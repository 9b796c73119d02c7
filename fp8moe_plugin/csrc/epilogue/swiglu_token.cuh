// SwiGLU with quantization of a group of 128 channels of one token, by a warp: four channels per lane.
#pragma once
#include "device/fp8.cuh"
#include "epilogue/activation.cuh"

DEVICE u32 four_codes(uint2 value, float scale, float inverse) {
    const float2 low = unpack_bf16x2(value.x), high = unpack_bf16x2(value.y);
    return pack_e4m3x4(divide(low.x, scale, inverse), divide(low.y, scale, inverse), divide(high.x, scale, inverse),
                       divide(high.y, scale, inverse));
}

// Quantizes the lane's four channels to `*q`; returns the scale of the group.
template <class FourCodes>
DEVICE float store_quantized(uint2 value, FourCodes* q) {
    u32 amax = larger_of(max_u16x2(value.x & kNoSigns, value.y & kNoSigns));
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
    float scale = group_scale(amax), inverse = __frcp_rn(scale);
    *q = four_codes(value, scale, inverse);
    return scale;
}
