// Gives each (token, expert) pair a row such that rows of one expert follow one another, in the order of the pairs; and
// cuts the rows of each expert into tiles.
//
// In:   ids, expert_map  see expert_ids.cuh
//       counts           u32 [chunks, ceil(num_experts / 2)], see count_experts.cu; not read if there is one chunk
// Out:  slots       int32 [pairs], the row of each pair; -1 for a pair whose expert is not here
//       tokens      int32 [pairs], the token of each row, of which there are *num_rows
//       num_rows    int32 [1]
//       table, num_tiles, ready  see write_table in tile_table.cuh
//
// Grid: chunks of THREADS pairs, a thread a pair.    num_experts: at most THREADS.
// Launched early, behind count_experts, if there is more than one chunk.
// No atomics decide an order, so it is the same in each run: a pair comes behind those of the chunks before its own, of
// the warps before its own, of the lanes before its own.
#include "expert_ids.cuh"
#include "tile_table.cuh"

constexpr int kWarps = THREADS / kWarp;
constexpr int kBatch = 8;  // loads in flight
constexpr u32 kOnes = 0x01010101;
static_assert(kBatch * THREADS < kHigh, "halves of words are added up");
static_assert(SMEM_BYTES == kWarps * THREADS, "a byte for each warp and expert");

// How many pairs of each expert each warp of the chunk has, at [warp / 4][expert], a byte a warp.
extern __shared__ u32 warp_counts[];

// How many pairs of `expert` the warps before `warp` have.
DEVICE int count_before_warp(int warp, int expert, int num_experts) {
    u32 count = 0;
#pragma unroll
    for (int first = 0; first < kWarps; first += 4) {
        if (first >= warp) break;
        const u32 four = warp_counts[first / 4 * num_experts + expert];
        count = __dp4a(warp - first >= 4 ? four : four & ((1u << (warp - first) * 8) - 1), kOnes, count);
    }
    return count;
}

// Adds up the pairs of each expert in all chunks, and in those before this one. A thread adds every few chunks.
DEVICE void add_chunks(const u32* counts, int num_experts, int* all, int* before) {
    const int words = ceil_div(num_experts, 2), stride = THREADS / words * words, word = threadIdx.x % words;
    const int own = blockIdx.x * words, end = gridDim.x * words;
    if (threadIdx.x >= stride) return;
    int all_low = 0, all_high = 0, before_low = 0, before_high = 0;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < end; begin += kBatch * stride) {
        u32 count[kBatch], sum = 0, sum_before = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)  // loads under a condition would not all be in flight at once
            count[i] = counts[min(begin + i * stride, end - 1)];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            sum += begin + i * stride < end ? count[i] : 0;
            sum_before += begin + i * stride < own ? count[i] : 0;
        }
        all_low += sum % kHigh, all_high += sum / kHigh;
        before_low += sum_before % kHigh, before_high += sum_before / kHigh;
    }
    atomicAdd(&all[word], all_low);
    atomicAdd(&all[word + words], all_high);
    atomicAdd(&before[word], before_low);
    atomicAdd(&before[word + words], before_high);
}

// Allowed more registers than two blocks of a multiprocessor would have: else a batch is loaded piece by piece.
extern "C" __global__ __launch_bounds__(THREADS, 1) void route(
    const void* __restrict__ ids, const int* __restrict__ expert_map, const u32* counts, int* __restrict__ slots,
    int* __restrict__ tokens, int* __restrict__ num_rows, int4* __restrict__ table, int* __restrict__ num_tiles,
    int* __restrict__ ready, int ids_64, int pairs, int topk, int global_experts, int num_experts, int block_m,
    int tile_counters) {
    let_next_kernel_start();
    __shared__ int totals[THREADS];     // pairs of each expert in all chunks
    __shared__ int next_rows[THREADS];  // the row of its first pair in this chunk
    const ExpertIds router{ids, expert_map, ids_64, pairs, global_experts, num_experts};
    const int pair = blockIdx.x * THREADS + threadIdx.x, warp = threadIdx.x / kWarp, lane = lane_of_warp();

    // Rank the pairs of the chunk among those of their expert.
    const int expert = router.expert_of(pair);
    for (int i = threadIdx.x; i < kWarps / 4 * num_experts; i += THREADS) warp_counts[i] = 0;
    totals[threadIdx.x] = next_rows[threadIdx.x] = 0;
    __syncthreads();
    const u32 same = __match_any_sync(kAllLanes, expert);
    int rank = __popc(same & ((1u << lane) - 1));
    if (expert != kNoExpert && rank == 0)
        reinterpret_cast<u8*>(&warp_counts[warp / 4 * num_experts + expert])[warp % 4] = __popc(same);
    __syncthreads();
    if (expert != kNoExpert) rank += count_before_warp(warp, expert, num_experts);

    // Count the pairs of each expert, an expert a thread.
    int total = 0;
    if (gridDim.x == 1) {
        if (threadIdx.x < num_experts) total = count_before_warp(kWarps, threadIdx.x, num_experts);
    } else {
        wait_for_previous_kernel();
        add_chunks(counts, num_experts, totals, next_rows);
        __syncthreads();
        total = totals[threadIdx.x];
    }
    int rows;
    const int row_begin = exclusive_scan<THREADS>(total, rows);
    next_rows[threadIdx.x] += row_begin;
    __syncthreads();

    // Hand out the rows, and cut them into tiles.
    if (pair < pairs) slots[pair] = expert == kNoExpert ? -1 : next_rows[expert] + rank;
    if (expert != kNoExpert) tokens[next_rows[expert] + rank] = pair / topk;
    if (blockIdx.x > 0) return;
    if (threadIdx.x == 0) *num_rows = rows;
    const auto own_rows = [&](int) { return make_int2(row_begin, row_begin + total); };  // one window
    write_table<THREADS>(table, num_tiles, ready, tile_counters, num_experts, block_m, own_rows);
}
