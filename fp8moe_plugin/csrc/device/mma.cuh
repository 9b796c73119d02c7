// mma of one warp: bfloat16 operands in registers, sums in float32. Needs no shared memory.
#pragma once
#include "device/common.cuh"

// d += a * b of 16 rows, 8 columns and 16 channels. Lane l has of a channels 2 * (l % 4) and the next in a[0] (row
// l / 4) and a[1] (8 rows on), and of b in b[0] (column l / 4); a[2], a[3] and b[1] are 8 channels on. Its sums are of
// columns 2 * (l % 4) and the next: d[0], d[1] of row l / 4, d[2], d[3] 8 rows on.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
