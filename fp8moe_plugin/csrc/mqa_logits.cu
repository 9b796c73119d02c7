// The indexer's logits of contiguous KV: logits[i, j] = scale[j] * sum over heads h of weights[i, h] *
// relu(q[i, h] . k[j]), for the KV rows j in [starts[i], ends[i]).
//
// The tiles of a block of tokens are KV rows from the first that any of its tokens has to the last. All tiles of all
// blocks of tokens, in order, are dealt out in equal runs, to which each block of tokens adds kBlockCost: rows of
// unequal length cost no tail, and nothing is counted in global memory.
//
// In:   q_map           e4m3 [m * HEADS, dim], boxes of MQA_COLUMNS rows of 128 bytes; dim 32, 64 or 128
//       k_map           e4m3 [n, dim], boxes of 64 rows of 128 bytes
//       scales          float32 [n]
//       weights         float32 [m, HEADS], rows weights_pitch elements apart
//       starts, ends    int32 [m]; clamped to [0, n], an end before the start is an empty row
// Out:  logits          float32 or (bf16) bfloat16 [m, ..], rows logits_pitch elements apart. Column j is KV row j, or
//                       with width > 0 KV row starts[i] + j, j < width. The rest is not written, but with `clean` the
//                       columns up to n outside of [starts[i], ends[i]) are -inf.
//
// Grid: any number of blocks, one a multiprocessor.
#include "pipeline/logit_tiles.cuh"
#include "pipeline/producer.cuh"

constexpr int kTokens = MQA_COLUMNS / HEADS;
constexpr int kBlockCost = 1;  // of a block of tokens, in tiles: until its weights are in registers
constexpr int kFillWarp = kQueryWarp + 1, kFillWarps = kWarps - kFillWarp;
constexpr u32 kBytesPlan = (kWarps + 3) * 4;
using Stages = LogitStages<kTokens, 0, kBytesPlan>;

struct Rows {
    const int *starts, *ends;
    int m, n, width;

    // What is given for a token, or for the last one if there is none.
    DEVICE int2 given(int token) const {
        const int at = min(token, m - 1);
        return make_int2(starts[at], ends[at]);
    }
    // The KV rows [first, end) of a token whose range was given as this; (0, 0) if it has none.
    DEVICE int2 clamped(int2 given) const {
        const int start = max(given.x, 0);
        int end = max(min(given.y, n), 0);
        if (width > 0 && end - start > width) end = start + width;
        return start < end ? make_int2(start, end) : make_int2(0, 0);
    }
    DEVICE int2 of(int token) const { return clamped(given(token)); }
};

// The tiles of a block of tokens, by their first KV row. That is aligned so that the 16 logits that a warp stores of a
// row are in as few sectors of 32 bytes as possible.
struct TileRun {
    static constexpr int kNone = 0x7FFFFFFF;
    int begin, tiles;

    // The union of the ranges; begin is kNone and end 0 if all of them are empty.
    DEVICE TileRun(const Rows& rows, int first, int end) {
        begin = first == kNone ? 0 : first;
        if (rows.width == 0) begin -= begin % 16;
        tiles = ceil_div(end - begin, kTileRows);
    }
    DEVICE int cost() const { return tiles > 0 ? tiles + kBlockCost : 0; }

    // By one thread.
    DEVICE static TileRun of_block(const Rows& rows, int block) {
        int2 given[kTokens];
#pragma unroll
        for (int i = 0; i < kTokens; ++i) given[i] = rows.given(block * kTokens + i);
        int first = kNone, end = 0;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const int2 kv = rows.clamped(given[i]);
            if (kv.x < kv.y) first = min(first, kv.x);
            end = max(end, kv.y);
        }
        return {rows, first, end};
    }
    // By one warp, of whose lanes each has what is given for a token.
    DEVICE static TileRun of_lanes(const Rows& rows, int2 given) {
        const int2 kv = rows.clamped(given);
        int first = kv.x < kv.y ? kv.x : kNone, end = kv.y;
#pragma unroll
        for (int offset = 1; offset < kTokens; offset *= 2) {
            first = min(first, __shfl_xor_sync(kAllLanes, first, offset));
            end = max(end, __shfl_xor_sync(kAllLanes, end, offset));
        }
        return {rows, first, end};
    }
};

// What is left for a block of the grid: the next block of tokens, from where on in its cost, and how much in all.
struct Work {
    int block, from, left;

    // Calls f(segment, what is given for the lane's token) for each segment; by one warp. The next block's ranges are
    // on their way in the meantime.
    template <class F>
    DEVICE void each_segment(const Rows& rows, F f) {
        const int token = lane_of_warp() % kTokens;
        int2 ahead = rows.given(block * kTokens + token);
        for (; left > 0; ++block, from = 0) {
            const int2 given = ahead;
            ahead = rows.given((block + 1) * kTokens + token);
            const TileRun run = TileRun::of_lanes(rows, given);
            const int taken = min(run.cost() - from, left), tiles = min(run.tiles - from, taken);
            left -= taken;
            if (tiles > 0) f(Segment{run.begin + from * kTileRows, tiles, block * kTokens}, given);
        }
    }
};

// The work of this block of the grid, by all of its threads: of `blocks` blocks of tokens each thread adds up the cost
// of some that follow one another.
DEVICE Work work_of_block(Stages shared, const Rows& rows) {
    const u32 sums = shared.other(), found = sums + kWarps * 4;
    const int blocks = ceil_div(rows.m, kTokens), each = ceil_div(blocks, THREADS);
    const int begin = min(int(threadIdx.x) * each, blocks), end = min(begin + each, blocks);
    int cost = 0;
#pragma unroll 1
    for (int block = begin; block < end; ++block) cost += TileRun::of_block(rows, block).cost();
    int through = cost;  // up to and including this thread's
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(kAllLanes, through, offset);
        through += lane_of_warp() >= offset ? other : 0;
    }
    if (lane_of_warp() == kWarp - 1) store_shared(sums + threadIdx.x / kWarp * 4, u32(through));
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        const int sum = load_shared(sums + warp * 4);
        through += warp < threadIdx.x / kWarp ? sum : 0;
        total += sum;
    }
    const int index = blockIdx.x, quotient = total / int(gridDim.x), rest = total % int(gridDim.x);
    const int first = index * quotient + min(index, rest), left = quotient + (index < rest);
    const int before = through - cost;
    if (left > 0 && first >= before && first < through) {
        int block = begin, from = first - before;
        for (int count; from >= (count = TileRun::of_block(rows, block).cost()); ++block) from -= count;
        store_shared(found, make_uint2(block, from));
    }
    __syncthreads();
    if (left == 0) return {0, 0, 0};
    return {int(load_shared(found)), int(load_shared(found + 4)), left};
}

// By one lane of one warp: other lanes that waited for the same stages could fall a phase behind.
DEVICE void load_tiles(Stages shared, const Rows& rows, Work work, const TensorMap* k_map) {
    Ring<Stages::kStages> ring;
    work.each_segment(rows, [&](const Segment& segment, int2) {
        if (lane_of_warp() != 0) return;
        fill_stages<barrier_wait, 4>(shared, ring, 0, segment.tiles, [&](int tile, int s, u32 full) {
            barrier_arrive_expect(full, Stages::kBytesTile);
            tma_load(shared.tile(s), k_map, full, 0, segment.row + tile * kTileRows);
        });
    });
}

// By one warp.
DEVICE void load_queries(Stages shared, const Rows& rows, Work work, const TensorMap* q_map, const float* weights,
                         int weights_pitch) {
    Queries<Stages> queries{shared, q_map, weights, weights_pitch};
    work.each_segment(rows, [&](const Segment& segment, int2 given) {
        const int tokens = rows.m - segment.token;
        queries.begin(segment.token, tokens);
        queries.finish(segment, lane_of_warp() < tokens ? rows.clamped(given) : make_int2(0, 0));
    });
    queries.end();
}

// -inf wherever the math warpgroups of any block write nothing, up to column n; by one warp of those of this role.
DEVICE void fill_outside(const Rows& rows, const Logits& logits, int warp) {
    const float minus_infinity = __uint_as_float(0xFF800000);
    for (int token = blockIdx.x * kFillWarps + warp; token < rows.m; token += gridDim.x * kFillWarps) {
        const int2 kv = rows.of(token);
        const i64 row = i64(token) * logits.pitch;
#pragma unroll 1
        for (int column = lane_of_warp(); column < kv.x; column += kWarp) logits.store(row + column, minus_infinity);
#pragma unroll 1
        for (int column = kv.y + lane_of_warp(); column < rows.n; column += kWarp)
            logits.store(row + column, minus_infinity);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mqa_logits(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
               const float* __restrict__ scales, const float* __restrict__ weights, int weights_pitch,
               const int* __restrict__ starts, const int* __restrict__ ends, void* logits, int logits_pitch, int bf16,
               int m, int n, int dim, int width, int clean) {
    const Stages shared{dynamic_shared_address()};
    const int warp = warp_uniform(threadIdx.x / kWarp);
    const Rows rows{starts, ends, m, n, width};
    const Logits out{logits, logits_pitch, bf16, width > 0};
    init_logit_barriers(shared, q_map, k_map);
    const Work work = work_of_block(shared, rows);  // here all threads meet
    if (warp >= kMathWarps) {
        decrease_registers<kProducerRegisters>();
        if (warp == kTileWarp) load_tiles(shared, rows, work, &k_map);
        if (warp == kQueryWarp) load_queries(shared, rows, work, &q_map, weights, weights_pitch);
        if (warp >= kFillWarp && clean) fill_outside(rows, out, warp - kFillWarp);
        return;
    }
    increase_registers<kMathRegisters>();
    // The scales are read while the tensor cores work: that hides the way to L2, and no copy has to be aligned.
    auto scale = [&](int, u32 row, int offset) {
        const u32 first = offset + row, second = first + 8;
        const float* const at = scales + first;
        return make_float2(first < n ? __ldg(at) : 0.f, second < n ? __ldg(at + 8) : 0.f);
    };
    if (dim > kRowBytes / 2)
        compute_logits<kRowSteps>(shared, warp / 4, out, scale);
    else
        compute_logits<kRowSteps / 2>(shared, warp / 4, out, scale);
}
