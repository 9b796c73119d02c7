// The pipeline of the indexer's logits, of contiguous and of paged KV: shared memory, and the math warpgroups.
//
// A block works on segments. A segment is kTokens tokens with all their heads, the narrow operand of wgmma, and a run
// of tiles of 64 consecutive KV rows, the wide operand. Producers fill a ring of tiles and a ring of queries. The two
// math warpgroups take turns, with every second tile each: one has its tile in the tensor cores while the other one
// sums up the heads of the tile before. Left to themselves they would fall into step, and share the tensor cores first
// and the other pipes next.
#pragma once
#include "device/wgmma_256.cuh"
#include "epilogue/head_sums.cuh"
#include "pipeline/ring.cuh"

constexpr int kTileRows = MQA_TILE_ROWS, kRowBytes = 128;  // a row of less is padded with zeros by TMA
constexpr int kRowSteps = kRowBytes / 32;                  // of wgmma
constexpr int kMathWarpgroups = 2, kMathWarps = 4 * kMathWarpgroups;
constexpr int kTileWarp = kMathWarps, kQueryWarp = kTileWarp + 1, kWarps = kMathWarps + 4;
static_assert(kWarps * kWarp == THREADS, "the launch has a thread for each role");
constexpr int kProducerRegisters = 40, kMathRegisters = 232;  // together the 168 a thread of the launch

// Where the logits go. `row_begins`: column 0 of a row is its first KV row; else it is KV row 0.
struct Logits {
    void* data;
    int pitch;  // elements from row to row
    int bf16, row_begins;

    DEVICE void store(i64 at, float value) const {
        if (bf16)
            static_cast<u16*>(data)[at] = bf16_bits(value);
        else
            static_cast<float*>(data)[at] = value;
    }
};

struct Segment {
    int row;    // the first KV row
    int tiles;  // 0: none of these tokens; kEnd: there are no more segments
    int token;  // the first row of the logits
    static constexpr int kEnd = -1;
};

// Operand tiles are at multiples of 1024 bytes, which their swizzle needs. kScaleBytes: scales in a tile's stage;
// kMostStages: of tiles, even if there is room for more.
template <int kTokensOfSegment, u32 kScaleBytes, u32 kOtherBytes = 0, int kMostStages = 64>
struct LogitStages {
    static constexpr int kQueryStages = 3, kTokens = kTokensOfSegment, kColumns = kTokens * HEADS;
    static constexpr u32 kBytesQuery = kColumns * kRowBytes, kBytesTile = kTileRows * kRowBytes;
    static constexpr u32 kBytesLimits = (kTokens + 1) / 2 * 16, kBytesWeights = kColumns * 4;
    static constexpr u32 kBytesQueryStage = kBytesQuery + kBytesWeights + kBytesLimits + 16 + 2 * 8;
    static constexpr u32 kBytesStage = kBytesTile + kScaleBytes + 2 * 8;
    static constexpr u32 kTurnBytes = kMathWarpgroups * 8;
    static constexpr int kFit = (SMEM_BYTES - kQueryStages * kBytesQueryStage - kTurnBytes - kOtherBytes) / kBytesStage;
    static constexpr int kStagesOfOne = (kFit < kMostStages ? kFit : kMostStages) / kMathWarpgroups,
                         kStages = kStagesOfOne * kMathWarpgroups;
    static constexpr u32 kTiles = kQueryStages * kBytesQuery, kScales = kTiles + kStages * kBytesTile;
    static constexpr u32 kWeights = kScales + kStages * kScaleBytes;
    static constexpr u32 kLimits = kWeights + kQueryStages * kBytesWeights;
    static constexpr u32 kSegments = kLimits + kQueryStages * kBytesLimits, kFull = kSegments + kQueryStages * 16;
    static constexpr u32 kEmpty = kFull + kStages * 8, kQueryFull = kEmpty + kStages * 8;
    static constexpr u32 kQueryEmpty = kQueryFull + kQueryStages * 8, kTurns = kQueryEmpty + kQueryStages * 8;
    static constexpr u32 kOther = kTurns + kTurnBytes;
    static_assert(kOther + kOtherBytes <= SMEM_BYTES && kStages >= 4, "each warpgroup has several stages");

    u32 base;
    DEVICE u32 query(int stage) const { return base + stage * kBytesQuery; }
    DEVICE u32 tile(int stage) const { return base + kTiles + stage * kBytesTile; }
    DEVICE u32 scale(int stage, u32 row) const { return base + kScales + stage * kScaleBytes + row * 4; }
    DEVICE u32 weight(int stage, int column) const { return base + kWeights + stage * kBytesWeights + column * 4; }
    DEVICE u32 limits(int stage, int token) const { return base + kLimits + stage * kBytesLimits + token * 8; }
    DEVICE u32 segment(int stage) const { return base + kSegments + stage * 16; }
    DEVICE u32 full(int stage) const { return base + kFull + stage * 8; }
    DEVICE u32 empty(int stage) const { return base + kEmpty + stage * 8; }  // an arrival of each warp of its warpgroup
    DEVICE u32 query_full(int stage) const { return base + kQueryFull + stage * 8; }
    DEVICE u32 query_empty(int stage) const { return base + kQueryEmpty + stage * 8; }
    DEVICE u32 turn(int warpgroup) const { return base + kTurns + warpgroup * 8; }
    DEVICE u32 other() const { return base + kOther; }
};

// All threads of the block call it, and meet before the barriers are used. The instruction takes a uniform address: if
// lanes initialized a barrier each, it would be repeated for each of them, for 2 us in all.
template <class SharedMemory>
DEVICE void init_logit_barriers(SharedMemory shared, const TensorMap& q_map, const TensorMap& kv_map) {
    if (threadIdx.x == 0) {
        prefetch(&q_map);
        prefetch(&kv_map);
        for (int i = 0; i < kMathWarpgroups; ++i) barrier_init(shared.turn(i), 4);
    } else if (threadIdx.x == kWarp) {
        for (int i = 0; i < SharedMemory::kStages; ++i) barrier_init(shared.full(i), 1);
    } else if (threadIdx.x == 2 * kWarp) {
        for (int i = 0; i < SharedMemory::kStages; ++i) barrier_init(shared.empty(i), 4);
    } else if (threadIdx.x == 3 * kWarp) {
        for (int i = 0; i < SharedMemory::kQueryStages; ++i) {
            barrier_init(shared.query_full(i), 1 + kWarp);
            barrier_init(shared.query_empty(i), kMathWarps);
        }
    }
    barrier_init_fence();
}

// ---- the producer of queries: one warp ------------------------------------------------------------------------------

// Publishes one segment after the other, each in two steps: what does not depend on the segment's tiles is on its way
// while they are looked up.
template <class SharedMemory>
struct Queries {
    static constexpr int kTokens = SharedMemory::kTokens, kWeights = SharedMemory::kColumns / kWarp;

    SharedMemory shared;
    const TensorMap* q_map;
    const float* weights;
    int weights_pitch;
    Ring<SharedMemory::kQueryStages> ring;
    float kept[kWeights];  // of the lane's columns

    // The queries and weights of `tokens` tokens, from `token` on.
    DEVICE void begin(int token, int tokens) {
        const float* of_token = weights + i64(token) * weights_pitch + lane_of_warp();
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
            const int t = i * kWarp / HEADS, head = i * kWarp % HEADS;
            if (i > 0 && head == 0) of_token += weights_pitch;
            kept[i] = t < tokens ? of_token[head] : 0.f;
        }
        barrier_wait(shared.query_empty(ring.stage), ring.phase ^ 1);
        if (lane_of_warp() != 0) return;
        barrier_arrive_expect(shared.query_full(ring.stage), SharedMemory::kBytesQuery);
        tma_load(shared.query(ring.stage), q_map, shared.query_full(ring.stage), 0, token * HEADS);
    }

    // The lane's token, one of the first, has the KV rows [rows.x, rows.y).
    DEVICE void finish(const Segment& segment, int2 rows) {
        const int stage = ring.stage, lane = lane_of_warp();
#pragma unroll
        for (int i = 0; i < kWeights; ++i)
            store_shared(shared.weight(stage, i * kWarp + lane), __float_as_uint(kept[i]));
        if (lane < kTokens) store_shared(shared.limits(stage, lane), make_uint2(rows.x, rows.y - rows.x));
        if (lane == 0) {
            store_shared(shared.segment(stage), make_uint2(segment.row, segment.tiles));
            store_shared(shared.segment(stage) + 8, u32(segment.token));
        }
        barrier_arrive(shared.query_full(stage));  // by all lanes: racecheck does not follow one that arrives for them
        ring.advance();
    }

    // Behind the last segment.
    DEVICE void end() const {
        barrier_wait(shared.query_empty(ring.stage), ring.phase ^ 1);
        if (lane_of_warp() == 0) {
            store_shared(shared.segment(ring.stage), make_uint2(0, u32(Segment::kEnd)));
            barrier_arrive(shared.query_full(ring.stage));  // in place of that of the queries' load
        }
        barrier_arrive(shared.query_full(ring.stage));
    }
};

// ---- math -----------------------------------------------------------------------------------------------------------

// Scores of a tile over kSteps * 32 bytes; committed, not waited for.
template <int kSteps, int kColumns>
DEVICE void start_scores(Fragment<kColumns>& scores, u32 tile, u32 query) {
    const u32 a = wgmma_descriptor_low(tile), b = wgmma_descriptor_low(query);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps * kDescriptorStepK; step += kDescriptorStepK)
        wgmma(scores, wgmma_descriptor(a + step), wgmma_descriptor(b + step), step > 0);
    wgmma_commit();
}

// The logits of one tile after the other: summed up over the columns of each thread, then, while the tensor cores work
// on the next tile, over the threads, and stored.
template <int kTokens>
struct LogitRows {
    using Sums = HeadSums<kTokens>;
    static constexpr int kNone = -(1 << 30);

    u8* first_row;  // of the segment
    int element_bytes;
    u32 limits;
    int column[Sums::kResults];  // of KV row 0, from the first row on
    int offset = kNone;          // the tile's first KV row
    float sums[Sums::kSums];

    DEVICE LogitRows(const Logits& logits, int token, u32 limits) : limits(limits) {
        element_bytes = logits.bf16 ? 2 : 4;
        first_row = static_cast<u8*>(logits.data) + i64(token) * logits.pitch * element_bytes;
#pragma unroll
        for (int i = 0; i < Sums::kResults; ++i)
            column[i] = Sums::token(i) * logits.pitch - (logits.row_begins ? int(rows_of(i).x) : 0);
        clear(sums);
    }
    // The first of the KV rows of the token that result i belongs to, and how many it has.
    DEVICE uint2 rows_of(int i) const {
        if (kTokens % 2 && Sums::token(i) >= kTokens) return make_uint2(0, 0);
        const u32 at = limits + Sums::token(i) * 8;
        return make_uint2(load_shared(at), load_shared(at + 4));
    }
    DEVICE void store() const {
        float result[Sums::kResults];
        Sums::exchange_all(sums, result);
        const int row = offset + int(Sums::row());
#pragma unroll
        for (int i = 0; i < Sums::kResults; ++i) {
            const uint2 rows = rows_of(i);
            const bool there = u32(row) - rows.x < rows.y, narrow = element_bytes == 2;
            u8* const at = first_row + u64(u32(column[i] + row)) * u32(element_bytes);
            if (there && !narrow) *reinterpret_cast<float*>(at) = result[i];
            if (there && narrow) *reinterpret_cast<u16*>(at) = bf16_bits(result[i]);
        }
    }
};

// The weights of the thread's columns, from the address of its warpgroup's first weight on.
template <int kCount>
DEVICE void load_weights(float (&weights)[kCount], u32 from) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
        const float2 pair = load_shared_float2(from + (fragment_column(threadIdx.x) + column_offset(i)) * 4);
        weights[i] = pair.x, weights[i + 1] = pair.y;
    }
}

// The tiles of a math warpgroup, of whose rows kSteps * 32 bytes count. `scale(stage, row, offset)` are the scales of
// rows `row` and `row` + 8 of a tile whose first row is KV row `offset`.
template <int kSteps, class SharedMemory, class Scale>
DEVICE void compute_logits(SharedMemory shared, int warpgroup, const Logits& logits, Scale scale) {
    constexpr int kTokens = SharedMemory::kTokens, kColumns = SharedMemory::kColumns;
    const int lane = lane_of_warp();
    const u32 row = warp_row(threadIdx.x) + lane_row(threadIdx.x);
    Ring<SharedMemory::kStagesOfOne> ring;
    Ring<SharedMemory::kQueryStages> queries;
    u32 turn = warpgroup ^ 1;  // the first warpgroup begins
    int first = warpgroup;     // of its tiles in the segment
    for (;; queries.advance()) {
        barrier_wait(shared.query_full(queries.stage), queries.phase);
        const u32 segment = shared.segment(queries.stage), query = shared.query(queries.stage);
        const int begin = load_shared(segment), tiles = load_shared(segment + 4), token = load_shared(segment + 8);
        if (tiles == Segment::kEnd) return;
        if (first < tiles) {
            float weights[kColumns / 4];
            load_weights(weights, shared.weight(queries.stage, 0));
            LogitRows<kTokens> rows(logits, token, shared.limits(queries.stage, 0));
#pragma unroll 1
            for (int tile = first; tile < tiles; tile += kMathWarpgroups, ring.advance()) {
                const int stage = ring.stage * kMathWarpgroups + warpgroup, offset = begin + tile * kTileRows;
                Fragment<kColumns> scores;
                barrier_wait(shared.full(stage), ring.phase);
                barrier_wait(shared.turn(warpgroup), turn);
                turn ^= 1;
                start_scores<kSteps, kColumns>(scores, shared.tile(stage), query);
                if (lane == 0) barrier_arrive(shared.turn(warpgroup ^ 1));
                const float2 scales = scale(stage, row, offset);
                rows.store();
                wgmma_finish(scores);
                release(shared, stage);
                HeadSums<kTokens>::of_thread(scores, weights, scales, rows.sums);
                rows.offset = offset;
            }
            rows.store();
        }
        first = (first + tiles) % kMathWarpgroups;
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.query_empty(queries.stage));
    }
}
