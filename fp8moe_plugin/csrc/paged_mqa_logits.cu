// The indexer's logits of paged KV: those of mqa_logits.cu for NEXT_N tokens of each request, and all KV rows that the
// request has. The kernel takes as long as it takes to read the KV.
//
// A page is 64 rows of `dim` bytes, then their 64 float32 scales.
//
// In:   q_map         e4m3 [batch * NEXT_N * HEADS, dim], boxes of NEXT_N * HEADS rows of 128 bytes; NEXT_N 1 to 4
//       kv_map        e4m3 [pages, 64, dim], boxes of a page with rows of 128 bytes
//       kv            the pages again, page_stride bytes apart
//       weights       float32 [batch * NEXT_N, HEADS], rows weights_pitch elements apart
//       context_lens  int32 [batch, NEXT_N]; the last one of a request is the length of its KV, clamped to [0, most]
//       block_table   int32 [batch, table_width], rows table_pitch elements apart; anything behind a request's length
//       schedule      of paged_mqa_metadata.cu: entry i is where block i begins, entry i + 1 where it ends
// Out:  logits        float32 or (bf16) bfloat16 [batch * NEXT_N, ..], rows logits_pitch elements apart; only the
//                     columns below the request's length are written
//
// Grid: `sharers`, 1 or 2, blocks for each entry of the schedule but the last. Those of an entry share each of its runs
// of pages.
#include "device/load_once.cuh"
#include "pipeline/logit_tiles.cuh"
#include "pipeline/producer.cuh"

constexpr int kPagesOfSplit = MQA_SPLIT_ROWS / kTileRows;
constexpr u32 kScaleBytes = kTileRows * 4;
constexpr int kMostStages = 12;  // more loads at once are slower
using Stages = LogitStages<NEXT_N, kScaleBytes, 0, kMostStages>;

struct Requests {
    const int *context_lens, *block_table;
    int batch, table_pitch, table_width, most;

    // Of the last request where there is none.
    DEVICE int length(int request) const {
        return max(0, min(context_lens[(min(request, batch - 1) + 1) * NEXT_N - 1], most));
    }
    // What stands there, without a look at the length: it does not have to be known before.
    DEVICE int entry(int request, int page) const {
        return page < table_width ? block_table[i64(request) * table_pitch + page] : 0;
    }
};

// The pages of this block: from a split of a request on, up to another one.
struct Pages {
    int request, split, last_request, end_split;

    DEVICE static Pages of_block(const int* schedule, int sharers) {
        const int* const entry = schedule + 2 * (blockIdx.x >> (sharers - 1));
        return {entry[0], entry[1], entry[2], entry[3]};
    }
    DEVICE bool none() const { return request == last_request && split == end_split; }

    // Calls f(request, first page, end) for the pages of each request, and before it knows their end ahead(request,
    // page). The next request's length is on its way in the meantime.
    template <class Ahead, class F>
    DEVICE void each_request(const Requests& requests, int sharers, Ahead ahead, F f) const {
        const int share = blockIdx.x & (sharers - 1);
        int length = requests.length(request);
        for (int r = request, first = split * kPagesOfSplit; r <= last_request && r < requests.batch; ++r, first = 0) {
            if (sharers == 1) ahead(r, first);
            const int next_length = requests.length(r + 1);
            int end = ceil_div(length, kTileRows);
            length = next_length;
            if (r == last_request) end = min(end, end_split * kPagesOfSplit);
            const int count = end - first;
            if (count <= 0) continue;
            const int begin = first + (count * share >> (sharers - 1));
            end = first + (count * (share + 1) >> (sharers - 1));
            if (sharers > 1) ahead(r, begin);
            if (begin < end) f(r, begin, end);
        }
    }
};

// By one warp, which looks up 32 pages at a time.
DEVICE void load_pages(Stages shared, const Requests& requests, const Pages& pages, int sharers,
                       const TensorMap* kv_map, const u8* kv, int page_stride, int dim) {
    const u64 policy = evict_first();
    Ring<Stages::kStages> ring;
    int entry;
    auto look_up = [&](int request, int page) { entry = requests.entry(request, page + lane_of_warp()); };
    pages.each_request(requests, sharers, look_up, [&](int request, int first, int end) {
        for (int page = first; page < end; ++page, ring.advance()) {
            const int at = (page - first) % kWarp;
            if (at == 0 && page > first) look_up(request, page);
            const int there = __shfl_sync(kAllLanes, entry, at), stage = ring.stage;
            wait_by_warp(shared.empty(stage), ring.phase ^ 1);
            if (lane_of_warp() != 0) continue;
            barrier_arrive_expect(shared.full(stage), shared.kBytesTile + kScaleBytes);
            tma_load_3d(shared.tile(stage), kv_map, shared.full(stage), 0, 0, there, policy);
            bulk_load(shared.scale(stage, 0), kv + i64(there) * page_stride + kTileRows * dim, shared.full(stage),
                      kScaleBytes, policy);
        }
    });
}

// By one warp. The first request's queries are on their way before its length is known.
DEVICE void load_queries(Stages shared, const Requests& requests, const Pages& pages, int sharers,
                         const TensorMap* q_map, const float* weights, int weights_pitch) {
    Queries<Stages> queries{shared, q_map, weights, weights_pitch};
    int begun = -1;
    auto begin = [&](int request) {
        queries.begin(request * NEXT_N, NEXT_N);
        begun = request;
    };
    auto give_up = [&] {  // a share of the request's pages may be empty
        if (begun >= 0) queries.finish({0, 0, 0}, make_int2(0, 0));
        begun = -1;
    };
    auto nothing = [](int, int) {};
    if (!pages.none() && pages.request < requests.batch) begin(pages.request);
    pages.each_request(requests, sharers, nothing, [&](int request, int first, int end) {
        if (begun != request) {
            give_up();
            begin(request);
        }
        const Segment segment{first * kTileRows, end - first, request * NEXT_N};
        queries.finish(segment, make_int2(0, requests.length(request)));
        begun = -1;
    });
    give_up();
    queries.end();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_mqa_logits(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const u8* kv,
                     int page_stride, const float* __restrict__ weights, int weights_pitch,
                     const int* __restrict__ context_lens, const int* __restrict__ block_table, int table_pitch,
                     int table_width, const int* __restrict__ schedule, void* logits, int logits_pitch, int bf16,
                     int batch, int dim, int most, int sharers) {
    const Stages shared{dynamic_shared_address()};
    const Requests requests{context_lens, block_table, batch, table_pitch, table_width, most};
    const Logits out{logits, logits_pitch, bf16, 0};
    const int warp = warp_uniform(threadIdx.x / kWarp);
    Pages pages{};
    if (warp >= kMathWarps) pages = Pages::of_block(schedule, sharers);  // others initialize barriers meanwhile
    init_logit_barriers(shared, q_map, kv_map);
    __syncthreads();
    if (warp >= kMathWarps) {
        decrease_registers<kProducerRegisters>();
        if (warp == kTileWarp) load_pages(shared, requests, pages, sharers, &kv_map, kv, page_stride, dim);
        if (warp == kQueryWarp) load_queries(shared, requests, pages, sharers, &q_map, weights, weights_pitch);
        return;
    }
    increase_registers<kMathRegisters>();
    compute_logits<kRowSteps>(shared, warp / 4, out, [&](int stage, u32 row, int) {
        return make_float2(load_shared_float(shared.scale(stage, row)),
                           load_shared_float(shared.scale(stage, row + 8)));
    });
}
