// Packs projections in MXFP4 for the GEMMs; fp8moe_plugin/ops/mxfp4.py has the layouts, and the same in plain torch.
//
// In:   codes      uint8 [E, rows, 16 * groups], as in the checkpoint
//       exponents  uint8 [E, rows, groups], one for 32 channels; at most `largest`, and at most 14 less
// Out:  chunks     [E, row_blocks, steps, parts, kChunkBytes] for steps = k_blocks + further
//       scales     float32 [E, parts, row_blocks, steps + further]
//
// The projections are w2 (one part), or gate or up projections, which are part 0 or 1 of two; the other part is left as
// it is, except for the K blocks of this part's further steps. Blocks are zero-padded. Further steps hold zeros.
//
// Grid: (row_blocks * steps, E). A thread packs 64 channels of one of the block's 128 rows.
#include "device/common.cuh"
#include "formats/mxfp4_chunks.cuh"

constexpr int kGroups = 2;  // of 32 channels, that a thread packs
constexpr int kGroupsOfChunk = 4;
constexpr int kLargestQ = kFp4Tables - 1;
constexpr int kLargestExponent = 6;  // LARGEST_EXPONENT of fp8moe_plugin/ops/fp4_blocks.py
static_assert(THREADS * kGroups == kChunkRows * kGroupsOfChunk, "a thread block packs a chunk");

// Signs of four codes: bits 3, 7, 11 and 15, moved to bit 0 of each byte.
DEVICE u32 signs(u32 codes) {
    u32 bits = codes >> 3 & 0x1111;
    bits = (bits | bits << 8) & 0x00110011;
    return (bits | bits << 4) & 0x01010101;
}

// The word of eight codes of a thread of wgmma, see `words` of fp8moe_plugin/ops/mxfp4_words.py.
DEVICE u32 word_of(u32 first, u32 second) {
    return (first & 0x7777) | signs(first) << 7 | (second & 0x7777) << 16 | signs(second) << 3;
}

// The float32 2^(exponent - 127 - kLargestExponent), exact also below the smallest normal number.
DEVICE u32 base_bits(int exponent) {
    const int biased = exponent - kLargestExponent;
    return biased > 0 ? u32(biased) << 23 : 1u << (22 + biased);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_mxfp4(const uint4* __restrict__ codes, const u8* __restrict__ exponents, u8* __restrict__ chunks,
               u32* __restrict__ scales, int rows, int groups, int row_blocks, int k_blocks, int further, int parts,
               int part, int largest) {
    const int steps = k_blocks + further;
    const int expert = blockIdx.y, row_block = blockIdx.x / steps, step = blockIdx.x % steps;
    const int row = threadIdx.x / kGroups, pair = threadIdx.x % kGroups;
    const bool is_further = step >= k_blocks;

    // Load. What lies outside of the projection, as further steps do, is zero.
    uint4 group[kGroups];
    int exponent[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        group[i] = make_uint4(0, 0, 0, 0);
        exponent[i] = 0;
        const int r = row_block * kChunkRows + row, g = step * kGroupsOfChunk + pair * kGroups + i;
        if (r < rows && g < groups) {
            const i64 at = (i64(expert) * rows + r) * groups + g;
            group[i] = codes[at];
            exponent[i] = exponents[at];
        }
    }

    // Store codes and exponents. A slab has 64 rows, of w13 half of them gate and half up.
    const i64 block = (i64(expert) * row_blocks + row_block) * steps + step;
    const int rows_of_slab = kSlabRows / parts, rows_of_warp = rows_of_slab / 4;
    const int slab = row / rows_of_slab, half = parts == 1 ? row / 8 % 2 : part;
    const int place = row % rows_of_slab / rows_of_warp * 8 + row % 8;  // of a warp's thread of four
    u8* const chunk = chunks + (block * parts + slab / 2) * kChunkBytes;
    u8* const to = chunk + slab % 2 * kSlabCodes + pair * (kSlabCodes / 2) + half * 4;
    u32 d = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
        const u32 first[2] = {group[i].x, group[i].y}, second[2] = {group[i].z, group[i].w};
#pragma unroll
        for (int thread = 0; thread < 4; ++thread) {
            const int shift = thread % 2 * 16;
            const u32 word = word_of(first[thread / 2] >> shift, second[thread / 2] >> shift);
            *reinterpret_cast<u32*>(to + slot_of(place, thread) * kThreadCodes + i * 8) = word;
        }
        const int q = is_further ? 0 : max(kLargestQ - (largest - exponent[i]), 0);
        d |= u32(8 * q) << i * 8;
    }
    u8* const to_d = chunk + 2 * kSlabCodes + slab % 2 * kSlabExponents + place * 8 + half * 4 + pair * kGroups;
    *reinterpret_cast<u16*>(to_d) = u16(d);

    // Store the scale, or of a further step also its K block, for both parts.
    if (threadIdx.x != 0) return;
    const int pitch = steps + further;
    u32* const of_expert = scales + i64(expert) * parts * row_blocks * pitch;
    of_expert[(part * row_blocks + row_block) * pitch + step] = is_further ? __float_as_uint(1.0f) : base_bits(largest);
    const int slot = step - k_blocks;
    if (is_further && slot / (further / parts) == part)
        for (int p = 0; p < parts; ++p) of_expert[(p * row_blocks + row_block) * pitch + steps + slot] = 0;
}
