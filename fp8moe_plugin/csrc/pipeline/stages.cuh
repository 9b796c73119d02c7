// The layout of a thread block's shared memory. A kernel lists the areas in their order; each exists once, or once in
// each stage of the kernel's ring:
//
//     using SharedMemory = Stages<kAsManyAsFit, Weights<128>, Tokens<64>, TokenScales<64>, Full<1>, Empty<1>>;
//     const SharedMemory shared{dynamic_shared_address()};
//
// shared.tokens(stage, 3) is then the address of row 3 of the tokens in a stage.
#pragma once
#include "device/common.cuh"

template <int kCount, int kBytesOfElement, bool kOfStage, u32 kAlignmentOfArea = 4>
struct Area {
    static constexpr int kElement = kBytesOfElement;
    static constexpr u32 kBytes = kCount * kElement, kAlignment = kAlignmentOfArea;
    static constexpr bool kPerStage = kOfStage;
};
template <int kCount, int kElement, u32 kAlignment = 4>
using PerStage = Area<kCount, kElement, true, kAlignment>;
template <int kCount, int kElement, u32 kAlignment = 4>
using Once = Area<kCount, kElement, false, kAlignment>;

// Rows of 128 bytes. TMA and wgmma swizzle them, in a pattern that repeats every 1024 bytes.
constexpr int kRowOfTile = 128;
constexpr u32 kSwizzleBytes = 1024;
template <int kRows>
struct Weights;  // see formats/
template <int kCount>
struct WeightScales;
template <int kRows>
struct Tokens : PerStage<kRows, kRowOfTile, kSwizzleBytes> {};
template <int kRows>
struct Staging : Once<kRows, kRowOfTile, kSwizzleBytes> {};  // of results
// float32
template <int kCount>
struct TokenScales : PerStage<kCount, 4> {};
template <int kCount>
struct Amax : Once<kCount, 4> {};  // largest magnitudes
// A published tile, see tile.cuh.
template <int kCount>
struct TileOfStage : PerStage<kCount, 16, 16> {};
// mbarriers
template <int kCount>
struct Full : PerStage<kCount, 8, 8> {};  // arrivals of the producers
template <int kCount>
struct Empty : PerStage<kCount, 8, 8> {};  // an arrival of each math warp
template <int kCount>
struct Received : Once<kCount, 8, 8> {};

template <int kBytesOfParts>
struct Parts : Once<kBytesOfParts, 1> {};  // see cluster_sum.cuh

template <template <int> class Name, class AnyArea>
constexpr bool kIsNamed = false;
template <template <int> class Name, int kCount>
constexpr bool kIsNamed<Name, Name<kCount>> = true;

constexpr int kAsManyAsFit = 0;

template <int kWanted, class... Areas>
struct Stages {
    u32 base;

    // The first byte of area `index`; for the number of areas, the end of the last one.
    DEVICE static constexpr u32 begin(int index, int stages) {
        const u32 bytes[] = {(Areas::kPerStage ? stages : 1) * Areas::kBytes..., 0};
        const u32 alignment[] = {Areas::kAlignment..., 1};
        u32 at = 0;
        for (int i = 0;; ++i) {
            at = (at + alignment[i] - 1) / alignment[i] * alignment[i];
            if (i == index) return at;
            at += bytes[i];
        }
    }
    DEVICE static constexpr int most_stages() {
        int stages = 0;
        while (begin(sizeof...(Areas), stages + 1) <= SMEM_BYTES) ++stages;
        return stages;
    }
    static constexpr int kStages = kWanted == kAsManyAsFit ? most_stages() : kWanted;
    static constexpr u32 kEnd = begin(sizeof...(Areas), kStages);
    static_assert(kStages > 0 && kEnd <= SMEM_BYTES, "the launch has enough shared memory");
    static_assert(kWanted == kAsManyAsFit || SMEM_BYTES - kEnd < 1024, "the launch has what is needed, in whole KiB");

    template <template <int> class Name>
    DEVICE static constexpr u32 offset() {
        static_assert((kIsNamed<Name, Areas> || ...), "the kernel's list has this area");
        int index = 0;
        bool found = false;
        ((found = found || kIsNamed<Name, Areas>, index += !found), ...);
        return begin(index, kStages);
    }
    // Bytes of an area, in one stage.
    template <template <int> class Name>
    static constexpr u32 kBytes = ((kIsNamed<Name, Areas> ? Areas::kBytes : 0) + ...);

    // The address of element i, in a stage or of an area that exists once.
    template <template <int> class Name>
    DEVICE u32 at(int stage, int i) const {
        constexpr u32 kOffset = offset<Name>();
        return base + kOffset + stage * kBytes<Name> + i * Name<0>::kElement;
    }
    template <template <int> class Name>
    DEVICE u32 at(int i) const {
        constexpr u32 kOffset = offset<Name>();
        return base + kOffset + i * Name<0>::kElement;
    }
    DEVICE u32 weights(int stage, int row) const { return at<Weights>(stage, row); }
    DEVICE u32 tokens(int stage, int row) const { return at<Tokens>(stage, row); }
    DEVICE u32 weight_scale(int stage, int i) const { return at<WeightScales>(stage, i); }
    DEVICE u32 token_scale(int stage, int i) const { return at<TokenScales>(stage, i); }
    DEVICE u32 tile(int stage) const { return at<TileOfStage>(stage, 0); }
    DEVICE u32 full(int stage) const { return at<Full>(stage, 0); }
    DEVICE u32 empty(int stage) const { return at<Empty>(stage, 0); }
    DEVICE u32 staging(int row) const { return at<Staging>(row); }
    DEVICE u32 amax(int i) const { return at<Amax>(i); }
    DEVICE u32 parts() const { return at<Parts>(0); }
    DEVICE u32 received(int i) const { return at<Received>(i); }
};
