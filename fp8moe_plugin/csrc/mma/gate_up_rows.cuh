// The rows of weights in gate_up_small_batch: how they get into a stage, which channels a thread's rows are, and where
// the sums of these channels go.
//
// Of each of two slabs of 64 rows a thread has two rows. Of e4m3 weights these four are neighbouring channels of the
// half that the warpgroup has, the gate or the up projection (interleaved_map of
// fp8moe_plugin/launches/sm90/tensor_maps.py), and a stage has a slab of each half. Chunks have both halves in each
// slab (kStoredPaired): the thread's rows are the gate and the up projection of a channel, and of another one
// kSlabChannels further on. A stage has two slabs for each warpgroup, which are 64 channels.
//
// A token's sums are two rows in shared memory, each with 16 bytes for every lane of the warp that finishes the token.
// These are what one math thread has sent.
#pragma once
#include "formats/row_scales.cuh"
#include "mma/swap_ab.cuh"

constexpr int kSlabChannels = 32;
constexpr int kSlabsOfStage = kStoredPaired ? 2 : 1;  // for each warpgroup

// Loads what lane `half`, 0 or 1, loads of a stage's rows. `row`: the first one of that half, in units of 128 rows;
// `both`: lane 0's of both halves.
template <class Tile>
DEVICE void load_rows(Tile to, const WeightMap* map, const GateAndUp& both, u32 full, int step, int row, int half,
                      int slab) {
    if constexpr (!kStoredPaired)
        to.load_interleaved(half * 64, map, full, step, row, slab);
    else if (half == 0)
        to.load_gate_and_up(both, full, step);
}

// The scales of a slab's products.
template <int kTokens, bool kPaired = kStoredPaired>
struct SlabScales : OneScale<kTokens> {
    using OneScale<kTokens>::OneScale;
};
template <int kTokens>
struct SlabScales<kTokens, true> : GateUpScales<kTokens> {
    template <class Weights, class TokenScale>
    DEVICE SlabScales(const Weights& weights, TokenScale token_scale, int /*warpgroup*/)
        : GateUpScales<kTokens>(weights, token_scale) {}
};

// The row of sums, and the place in it, to which a math thread sends its sums of a token.
DEVICE int half_of_sums(int warpgroup, int lane) { return kStoredPaired ? lane / 4 % 2 : warpgroup; }
DEVICE int place_of_sums(int lane) {
    const u32 warp = threadIdx.x / kWarp;
    return kStoredPaired ? (warp * 4 + lane / 8) * 16 : (warp % 4 * 8 + lane / 4) * 16;
}

// The scales and the biases of the lane's four channels, gate first: those of row(i).
struct ChannelValues {
    RowScales<2 * 4> scales;
    RowBiases<2 * 4> biases;
    template <class Row>
    DEVICE ChannelValues(const WeightScale* scales, const float* biases, Row row)
        : scales(scales, row), biases(biases, row) {}
};
// Number i of these channels, in a group that begins with channel `first`: of chunks, they are two pairs of neighbours.
DEVICE int channel_of_lane(int first, int lane, int i) {
    if (!kStoredPaired) return first + lane * 4 + i;
    return first + lane / 16 * 2 * kSlabChannels + lane % 16 * 2 + i / 2 * kSlabChannels + i % 2;
}

// The 16 bytes of a lane in both rows become its four channels of the gate and of the up projection.
DEVICE void complete_sums(float4 (&half)[2], const ChannelValues& values) {
    if constexpr (kScalesOfRows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float* of = values.scales.of + h * 4;
            half[h].x *= of[0], half[h].y *= of[1], half[h].z *= of[2], half[h].w *= of[3];
        }
    }
    if constexpr (kStoredPaired) {
        const float4 even = half[0], odd = half[1];
        half[0] = make_float4(even.x, odd.x, even.z, odd.z);
        half[1] = make_float4(even.y, odd.y, even.w, odd.w);
    }
    if constexpr (kBias) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float* of = values.biases.of + h * 4;
            half[h].x += of[0], half[h].y += of[1], half[h].z += of[2], half[h].w += of[3];
        }
    }
}

// The e4m3 codes of these channels in memory: of chunks, they are two pairs of neighbouring channels.
struct TwoPairs {
    u16 first, others[kSlabChannels / 2 - 1], second;
    DEVICE void operator=(u32 codes) { first = codes, second = codes >> 16; }
};
DEVICE auto codes_at(u8* q, int lane) {
    if constexpr (kStoredPaired)
        return reinterpret_cast<TwoPairs*>(q + lane / 16 * 2 * kSlabChannels + lane % 16 * 2);
    else
        return reinterpret_cast<u32*>(q) + lane;
}
