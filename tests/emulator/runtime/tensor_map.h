// A tensor map of a row-major matrix, 128-byte swizzled, in the 128 bytes of a CUtensorMap.
#pragma once
#include "emulator.h"

namespace emu {
using i64 = long long;

struct TensorMap {
    static constexpr u64 kKind = 0x50414d554d45;
    static constexpr u32 kBoxRowBytes = 128;
    u64 kind;
    u8* base;
    i64 rows, row_bytes;
    int element_bytes;
    u32 box_rows;
    u32 box_bytes() const { return box_rows * kBoxRowBytes; }
};
static_assert(sizeof(TensorMap) <= 128);
}  // namespace emu
