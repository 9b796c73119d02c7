// Gives each (token, expert) pair a row, so that the rows of an expert are consecutive and in the order of the pairs,
// and cuts the rows of each expert into tiles.
//
// In:   ids, expert_map  see expert_ids.cuh
//       counts           u32 [chunks, ceil(num_experts / 2)], see count_experts.cu; unused for a single chunk
// Out:  slots       int32 [pairs], the row of each pair; -1 if its expert is not on this rank
//       tokens      int32 [pairs], the token of each of the first *num_rows rows
//       num_rows    int32 [1]
//       table, num_tiles, done_counters  see tile_table.cuh
//
// Grid: one thread block per chunk, one thread per pair.    num_experts: at most THREADS.
// With several chunks it overlaps count_experts (PDL). A single chunk waits for the previous kernel (PDL), whatever
// wrote ids, before it does anything.
// The order is deterministic: a pair follows those of its expert in earlier chunks, earlier warps and lower lanes. Only
// sums are atomic.
#include "pipeline/tile_table.cuh"
#include "routing/expert_ids.cuh"

constexpr int kWarps = THREADS / kWarp;
constexpr int kQuads = kWarps / 4;  // groups of four warps
constexpr int kBatch = 8;           // loads in flight
constexpr int kOnes = 0x01010101;
static_assert(kBatch * THREADS < kHigh, "sums of a batch fit in half a word");
static_assert(THREADS == PAIRS_PER_CHUNK && MAX_LOCAL_EXPERTS <= THREADS, "one thread per pair, one per expert");
static_assert(SMEM_BYTES == kQuads * THREADS * 4, "one word per quad and expert");

// At [quad][expert]: the expert's pairs in each warp of the quad, one byte per warp; later the row of the quad's first.
extern __shared__ int quads[];

// Adds up the pairs of each expert over all chunks, and over those before this one. Threads take chunks in turn.
DEVICE void add_chunks(const u32* counts, int num_experts, int* all, int* before) {
    const int words = ceil_div(num_experts, 2), stride = THREADS / words * words, word = threadIdx.x % words;
    const int own = blockIdx.x * words, end = gridDim.x * words;
    if (threadIdx.x >= stride) return;
    int all_low = 0, all_high = 0, before_low = 0, before_high = 0;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < end; begin += kBatch * stride) {
        u32 count[kBatch], sum = 0, sum_before = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)  // unconditional, so that all loads are in flight at once
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

// ids are not __restrict__: the compiler could then move their loads above the wait. Which element of expert_map is
// read depends on them.
// One block per SM, for more registers: with fewer, the loads of a batch would not all be in flight.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const void* ids, const int* __restrict__ expert_map, const u32* counts, int* __restrict__ slots,
          int* __restrict__ tokens, int* __restrict__ num_rows, int4* __restrict__ table, int* __restrict__ num_tiles,
          int* __restrict__ done_counters, int ids_64, int shared_expert, int pairs, int topk, int routed_experts,
          int num_experts, int block_m, int counters_per_tile) {
    if (gridDim.x == 1) wait_for_previous_kernel();  // else count_experts is that, and follows what made the ids
    let_next_kernel_start();
    __shared__ int totals[THREADS];   // pairs of each expert over all chunks
    __shared__ int earlier[THREADS];  // over the chunks before this one
    const ExpertIds router{ids, expert_map, ids_64, shared_expert, pairs, topk, routed_experts, num_experts};
    const int pair = blockIdx.x * THREADS + threadIdx.x, warp = threadIdx.x / kWarp, lane = lane_of_warp();
    const int quad = warp / 4 * THREADS, byte = warp % 4;
    int* const own_expert = &quads[threadIdx.x];  // used by the first num_experts threads

    // Rank the pairs of the chunk among those of their expert in the same quad of warps.
    const int id = router.id_of(pair);
    if (threadIdx.x < num_experts) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) own_expert[i * THREADS] = 0;
    }
    if (gridDim.x > 1) totals[threadIdx.x] = earlier[threadIdx.x] = 0;
    __syncthreads();
    const int expert = router.here(id);
    const u32 same = __match_any_sync(kAllLanes, expert);
    int rank = __popc(same & ((1u << lane) - 1));
    if (expert != kNoExpert && rank == 0) reinterpret_cast<u8*>(&quads[quad + expert])[byte] = __popc(same);
    __syncthreads();
    if (expert != kNoExpert) rank = __dp4a(quads[quad + expert] & ((1 << byte * 8) - 1), kOnes, rank);

    // Count the pairs of each expert, one thread per expert.
    int total = 0, before_quad[kQuads];
    if (threadIdx.x < num_experts) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            before_quad[i] = total;
            total = __dp4a(own_expert[i * THREADS], kOnes, total);
        }
    }
    int in_earlier = 0;
    if (gridDim.x > 1) {
        wait_for_previous_kernel();
        add_chunks(counts, num_experts, totals, earlier);
        __syncthreads();
        total = totals[threadIdx.x], in_earlier = earlier[threadIdx.x];
    }

    // Hand out the rows.
    const RowTiles tiles(total, block_m);
    const bool tailed = tiles.over > 0;  // experts with tails come first
    int before[3], all[3];               // of rows, of tiles of experts with tails, of other tiles
    exclusive_scan({total, tailed ? tiles.count : 0, tailed ? 0 : tiles.count}, ceil_div(num_experts, kWarp), before,
                   all);
    if (threadIdx.x < num_experts) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) own_expert[i * THREADS] = before[0] + in_earlier + before_quad[i];
    }
    __syncthreads();
    const int row = expert == kNoExpert ? -1 : quads[quad + expert] + rank;
    if (pair < pairs) slots[pair] = row;
    if (expert != kNoExpert) tokens[row] = u32(pair) / u32(topk);

    // Cut them into tiles, one thread per expert.
    if (blockIdx.x > 0 || threadIdx.x >= num_experts) return;
    const int first = tailed ? before[1] : all[1] + before[2], num = all[1] + all[2];
    write_group(table, first, tiles.count, threadIdx.x, before[0], before[0] + total);
    for (int i = threadIdx.x; i <= num * counters_per_tile; i += num_experts) done_counters[i] = 0;
    if (threadIdx.x > 0) return;
    write_num_tiles(num_tiles, num);
    *num_rows = all[0];
}
