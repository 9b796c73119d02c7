// A tensor map, 128-byte swizzled, in the 128 bytes of a CUtensorMap.
#pragma once
#include "emulator.h"

namespace emu {
using i64 = long long;

struct TensorMap {  // of each dimension, the innermost first
    static constexpr u64 kKind = 0x50414d554d45;
    u64 kind;
    u8* base;
    int dims, element_bytes;
    i64 sizes[kMostDims], strides[kMostDims];  // in elements; in bytes
    u32 box[kMostDims];
    u32 box_bytes() const {
        u32 bytes = element_bytes;
        for (int d = 0; d < dims; ++d) bytes *= box[d];
        return bytes;
    }
};
static_assert(sizeof(TensorMap) <= 128);
}  // namespace emu
