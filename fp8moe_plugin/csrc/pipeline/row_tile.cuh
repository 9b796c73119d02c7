// Row tiles, of gate_up.cu and grouped_gemm.cu: 128 tokens, and up to 16 more as a tail, by one or two halves of 128
// rows of weights. Here are the shape of a tile, the roles of the warps and the stages in shared memory.
#pragma once
#include "device/fragment.cuh"
#include "formats/weights.cuh"
#include "pipeline/activation_scales.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/stages.cuh"

constexpr int kBlockM = kManyRowsTile, kBlockK = 128, kHalfN = 128;
constexpr int kMathWarpgroups = 2, kMathWarps = 4 * kMathWarpgroups, kWarpgroupM = kBlockM / kMathWarpgroups;
static_assert(kWarpgroupM == BOX_ROWS, "a warpgroup multiplies a box");
constexpr int kThreads = kWarpgroup * (kMathWarpgroups + (kDecodedInStages ? 2 : 1));  // producers, decoders
static_assert(kThreads == THREADS, "the launch has a thread for each role");
constexpr int kProducerRegisters = kDecodedInStages ? 48 : 40, kDecoderRegisters = 48,
              kMathRegisters = kDecodedInStages ? 208 : 232;
static_assert(kProducerRegisters + (kDecodedInStages ? kDecoderRegisters : 0) + 2 * kMathRegisters ==
                  (kDecodedInStages ? 4 * 128 : 3 * 168),
              "the launch's registers per thread");
// Decoders take the registers of tails.
constexpr int kMostTailRows = kDecodedInStages ? 0 : kTailRows, kCut = kDecodedInStages ? kSharedTile : kBlockM;
constexpr int kMostRows = kDecodedInStages ? kSharedTile : kBlockM + kMostTailRows;  // of a tile
constexpr int kBlocksOfTile = kDecodedInStages ? 2 : 1;  // of a cluster, see shared_tiles.cuh
constexpr int kMathBarrier = 1 + kMathWarpgroups, kProducerBarrier = kMathBarrier + 1;

struct Operands {
    const TensorMap *tokens, *narrow_tokens;  // in boxes of 64 rows, and of kTailRows
    const WeightMap* weights;
    ActivationScales token_scales;
    const WeightScale* weight_scales;  // [experts, ceil(N / 128), K / 128]
    int n, k_blocks, steps;            // steps: of a tile
};

// Shared memory of a kernel with kStagingRows for its epilogue, and other areas of its own.
template <int kHalves, int kStagingRows, class... Others>
using RowTileStages = Stages<kAsManyAsFit, Tokens<kBlockM + kMostTailRows>, Weights<kHalves * kHalfN>,
                             Staging<kStagingRows>, TokenScales<kMostRows + ActivationScales::kSlack>,
                             WeightScales<kHalves>, TileOfStage<1>, Full<1>, Empty<1>, Others...>;

// The stages of a K block. Tokens and weights share a stage; but with kKeepWeights a tile of the same weights as the
// previous tile finds them where they are. The barriers of the tokens' stages guard the weights, too: as long as K is
// at most kStages steps, a load replaces only weights that were last read at least kStages steps earlier.
template <int kStages, bool kKeepWeights>
struct Rings {
    static constexpr bool kKeepsWeights = kKeepWeights;
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
