// PTX of the kernels that decode weights in clusters.
#pragma once
#include "device/ptx.cuh"

DEVICE void store_shared(u32 address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
DEVICE void store_async(u32 to, int4 v, u32 barrier) {
    const float4 bits = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    store_async(to, bits, barrier);
}
