// e2m1 codes to e4m3, times a power of two, without rounding: eight codes of a row of weights in eight instructions and
// a load.
//
// A table has the magnitudes of codes 0 to 7, a byte each, times 2^(q - 8). e4m3 represents them exactly for q from 0
// to 14, the smallest ones as subnormal numbers.
#pragma once
#include "device/ptx.cuh"

constexpr int kFp4Tables = 15, kFp4TableBytes = 8;

DEVICE u32 e4m3_magnitude(int code, int q) {
    if (code == 0) return 0;
    const int exponent = q - 2 + code / 2, mantissa = code > 1 ? code % 2 * 4 : 0;  // as e4m3 has them; 1: 0.5
    return exponent > 0 ? exponent << 3 | mantissa : (8 | mantissa) >> (1 - exponent);
}

// Writes the tables to `tables` in shared memory. Called by all threads of the block before a barrier.
DEVICE void write_fp4_tables(u32 tables) {
    const int q = threadIdx.x;
    if (q >= kFp4Tables) return;
    u32 half[2] = {0, 0};
#pragma unroll
    for (int code = 0; code < 8; ++code) half[code / 4] |= e4m3_magnitude(code, q) << code % 4 * 8;
    store_shared(tables + q * kFp4TableBytes, make_uint2(half[0], half[1]));
}

// The least entry, 8 q, whose table has normal numbers only.
constexpr u32 kLeastNormalFp4 = 24;
// The table of such an entry, without a load.
DEVICE uint2 normal_fp4_table(u32 entry) {
    return make_uint2(entry * 0x01010100 - 0x04081000, entry * 0x01010101 + 0x0C080400);
}
// Whether all entries of two words, four each, are normal.
DEVICE bool are_normal_fp4(uint2 entries) {
    constexpr u32 kUpTo128 = (128 - kLeastNormalFp4) * 0x01010101, kTop = 0x80808080;
    return (entries.x + kUpTo128 & entries.y + kUpTo128 & kTop) == kTop;
}

// A word has two times four codes, see `words` of fp8moe_plugin/ops/mxfp4_words.py. Returns each four as e4m3.
DEVICE uint2 decode_fp4(u32 word, uint2 table) {
    constexpr u32 kMagnitudes = 0x77777777, kSigns = 0x80808080;
    const u32 magnitudes = word & kMagnitudes;
    return make_uint2(select_bytes(table.x, table.y, magnitudes) | (word & kSigns),
                      select_bytes(table.x, table.y, magnitudes >> 16) | (word << 4 & kSigns));
}
