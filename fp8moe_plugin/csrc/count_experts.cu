// Counts the (token, expert) pairs of each expert in each chunk of THREADS pairs, for route.cu.
//
// In:   ids, expert_map  see expert_ids.cuh
// Out:  counts           u32 [chunks, words] with words = ceil(num_experts / 2); word w counts expert w in its low
//                        half and expert w + words in its high half
//
// Grid: chunks, one thread per pair.    num_experts: at most THREADS.
#include "routing/expert_ids.cuh"

static_assert(THREADS == PAIRS_PER_CHUNK && MAX_LOCAL_EXPERTS <= THREADS, "one thread per pair, one per expert");

extern "C" __global__ void __launch_bounds__(THREADS)
    count_experts(const void* __restrict__ ids, const int* __restrict__ expert_map, u32* __restrict__ counts,
                  int ids_64, int shared_expert, int pairs, int topk, int routed_experts, int num_experts) {
    let_next_kernel_start();
    __shared__ int count[THREADS];  // of each expert
    const ExpertIds router{ids, expert_map, ids_64, shared_expert, pairs, topk, routed_experts, num_experts};
    const int expert = router.expert_of(blockIdx.x * THREADS + threadIdx.x);
    count[threadIdx.x] = 0;
    __syncthreads();
    if (expert != kNoExpert) atomicAdd(&count[expert], 1);
    __syncthreads();
    const int word = threadIdx.x, words = ceil_div(num_experts, 2);
    if (word < words) counts[blockIdx.x * words + word] = count[word] + count[word + words] * kHigh;
}
