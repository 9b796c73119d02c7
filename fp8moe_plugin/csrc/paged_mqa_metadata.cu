// Deals out the splits of all requests, runs of MQA_SPLIT_ROWS KV rows, to the blocks of paged_mqa_logits.cu. One CTA.
//
// All splits in order are divided into `blocks` runs; where they are not divisible, the last runs get one more, so that
// blocks without work point at the first request.
//
// In:   context_lens  int32 [batch, next_n]; the last one of a request is the length of its KV
// Out:  schedule      int32 [blocks + 1, 2]: where a run begins, as (request, split of the request); the last entry is
//                     (batch, 0)
#include "device/common.cuh"

DEVICE int splits_of(const int* context_lens, int next_n, int request) {
    return ceil_div(max(context_lens[(request + 1) * next_n - 1], 0), MQA_SPLIT_ROWS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    paged_mqa_metadata(const int* __restrict__ context_lens, int* __restrict__ schedule, int batch, int next_n,
                       int blocks) {
    // Each thread counts the splits of some requests that follow one another.
    __shared__ int ends[THREADS];
    const int each = ceil_div(batch, THREADS);
    const int begin = min(int(threadIdx.x) * each, batch), end = min(begin + each, batch);
    int splits[1] = {0}, before[1], all[1];
    for (int request = begin; request < end; ++request) splits[0] += splits_of(context_lens, next_n, request);
    exclusive_scan(splits, THREADS / kWarp, before, all);
    ends[threadIdx.x] = before[0] + splits[0];
    __syncthreads();

    const int quotient = all[0] / blocks, rest = all[0] % blocks;
    for (int i = threadIdx.x; i <= blocks; i += THREADS) {
        const int first = i * quotient + max(0, i - (blocks - rest));
        int thread = 0;  // whose requests have the run's first split, or THREADS
#pragma unroll
        for (int step = THREADS / 2; step > 0; step /= 2)
            if (ends[thread + step - 1] <= first) thread += step;
        if (ends[thread] <= first) ++thread;
        int request = min(thread * each, batch), split = first - (thread > 0 ? ends[thread - 1] : 0);
        for (int count; request < batch && split >= (count = splits_of(context_lens, next_n, request)); ++request)
            split -= count;
        schedule[2 * i] = request;
        schedule[2 * i + 1] = split;
    }
}
