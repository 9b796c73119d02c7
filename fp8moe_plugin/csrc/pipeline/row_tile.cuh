// Row tiles, of gate_up.cu and grouped_gemm.cu: 128 tokens, and up to 16 more as a tail, by one or two halves of 128
// rows of weights. Here are the shape of a tile, the roles of the warps and the stages in shared memory.
#pragma once
#include "device/fragment.cuh"
#include "pipeline/activation_scales.cuh"
#include "pipeline/ring.cuh"

constexpr int kBlockM = kManyRowsTile, kBlockK = 128, kHalfN = 128;
constexpr int kMathWarpgroups = 2, kMathWarps = 4 * kMathWarpgroups, kWarpgroupM = kBlockM / kMathWarpgroups;
static_assert(kWarpgroupM == BOX_ROWS, "a warpgroup multiplies a box");
constexpr int kThreads = kWarpgroup * (kMathWarpgroups + 1);
static_assert(kThreads == THREADS, "the launch has a thread for each role");
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // on average the launch's 168 per thread
constexpr int kMathBarrier = 1 + kMathWarpgroups, kProducerBarrier = kMathBarrier + 1;

struct Operands {
    const TensorMap *tokens, *narrow_tokens, *weights;  // tokens in boxes of 64 rows, and of kTailRows
    ActivationScales token_scales;
    const float* weight_scales;  // [experts, ceil(N / 128), K / 128]
    int n, k_blocks;
};

// The layout of shared memory: operands; kStagingBytes for the epilogue at kStaging; scales, tiles and barriers; and
// from kStagesEnd on kOtherBytes for the kernel. There are as many stages as fit. Operand tiles and staging are at
// multiples of 1024 bytes, as their swizzle requires.
template <int kHalfCount, u32 kStagingBytes, u32 kOtherBytes>
struct RowTileStages {
    static constexpr int kHalves = kHalfCount;
    static constexpr u32 kBytesTokens = (kBlockM + kTailRows) * kBlockK, kBytesHalf = kHalfN * kBlockK;
    static constexpr u32 kBytesTokenScales = (kBlockM + kTailRows + ActivationScales::kSlack) * 4;
    static constexpr u32 kBytesStage = kBytesTokens + kHalves * (kBytesHalf + 4) + kBytesTokenScales + 16 + 2 * 8;
    static constexpr int kStages = (SMEM_BYTES - kStagingBytes - 15 - kOtherBytes) / kBytesStage;  // 15 to align tiles
    static constexpr u32 kWeights = kStages * kBytesTokens, kStaging = kWeights + kStages * kHalves * kBytesHalf;
    static constexpr u32 kTokenScales = kStaging + kStagingBytes;
    static constexpr u32 kWeightScales = kTokenScales + kStages * kBytesTokenScales;
    static constexpr u32 kTiles = (kWeightScales + kStages * kHalves * 4 + 15) / 16 * 16;
    static constexpr u32 kFull = kTiles + kStages * 16, kEmpty = kFull + kStages * 8;
    static constexpr u32 kStagesEnd = kEmpty + kStages * 8;
    static_assert(kStagesEnd + kOtherBytes <= SMEM_BYTES, "as many stages as fit");

    u32 base;
    DEVICE u32 tokens(int stage, int row) const { return base + stage * kBytesTokens + row * kBlockK; }
    DEVICE u32 weights(int stage, int half) const { return base + kWeights + (stage * kHalves + half) * kBytesHalf; }
    DEVICE u32 token_scale(int stage, int row) const {
        return base + kTokenScales + stage * kBytesTokenScales + row * 4;
    }
    DEVICE u32 weight_scale(int stage, int half) const { return base + kWeightScales + (stage * kHalves + half) * 4; }
    DEVICE u32 tile(int stage) const { return base + kTiles + stage * 16; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // one arrival per math warp
};

// The stages of a K block. Tokens and weights share a stage; but with kKeepWeights a tile of the same weights as the
// previous tile finds them where they are. The barriers of the tokens' stages guard the weights, too: as long as K is
// at most kStages steps, a load replaces only weights that were last read at least kStages steps earlier.
template <int kStages, bool kKeepWeights>
struct Rings {
    Ring<kStages> tokens, weights;
    int expert = -1, column = 0;  // of the previous tile

    DEVICE int weights_stage() const { return kKeepWeights ? weights.stage : tokens.stage; }
    DEVICE void advance() {
        tokens.advance();
        weights.advance();
    }
    // Called for each tile, by producer and math warps. Returns whether its weights are already there.
    DEVICE bool keep_weights(const Tile& tile, int k_blocks) {
        if (!kKeepWeights) return false;
        bool kept = tile.expert == expert && tile.column == column;
        if (kept) weights.go_back(k_blocks);
        expert = tile.expert, column = tile.column;
        return kept;
    }
};
