// Stores each token of this rank into the windows of the ranks that have one of its experts, and its ids and weights
// into those of all ranks. Ends when the tokens of all ranks have arrived here, see window.cuh.
//
// In:   x        bfloat16 [tokens, H], H = 128 * groups
//       ids      see expert_ids.cuh
//       weights  float32 [tokens, topk]
//       owners   int32 [experts], the rank that has each expert
// Out:  in the windows, rows rank * rows + [0, rows): tokens, scales, ids, weights; tokens past `tokens` have no ids
//
// QUANTIZE: 1: tokens become e4m3 with scales. 0: they stay bfloat16, for the small-batch kernels, which quantize them.
// UE8M0: 1 rounds scales up to powers of two.
// Grid: any number of blocks, which take the tokens in turn. It waits for the previous kernel (PDL) before it does
// anything.
#include "device/fp8.cuh"
#include "ranks/window.cuh"
#include "routing/token_ranks.cuh"

constexpr int kWarps = THREADS / kWarp, kGroupsPerWarp = kWarp / kGroupLanes;

#if QUANTIZE
constexpr int kScales = 2 * MAX_GROUPS;
using Part = uint2;  // what a lane stores of a group
#else
using Part = uint4;
#endif

// Stores the ids and weights of a token to all windows: a warp per rank.
DEVICE void push_ids(const Window* window, const ExpertIds& ids, const float* weights, int token, bool exists,
                     i64 row) {
    for (int i = threadIdx.x / kWarp; i < window->ranks; i += kWarps) {
        const int rank = window->peer(i);
        for (int column = lane_of_warp(); column < ids.topk; column += kWarp) {
            const i64 to = row * ids.topk + column;
            const float weight = exists ? weights[i64(token) * ids.topk + column] : 0.f;
            store_to_peer(window->in_window<u32>(rank, window->ids) + to, u32(ids.id_of(token * ids.topk + column)));
            store_to_peer(window->in_window<u32>(rank, window->weights) + to, __float_as_uint(weight));
        }
    }
}

// Stores the scales of a token to the windows that need it: a warp per rank.
DEVICE void push_scales(const Window* window, const float* scale, int groups, u32 needed, i64 row) {
    for (int i = threadIdx.x / kWarp; i < window->ranks; i += kWarps) {
        const int rank = window->peer(i);
        if (needed >> rank & 1)
            for (int group = lane_of_warp(); group < groups; group += kWarp)
                store_to_peer(window->in_window<u32>(rank, window->scales) + row * groups + group,
                              __float_as_uint(scale[group]));
    }
}

// Inputs are not __restrict__: the compiler could then move their loads above the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    push_tokens(const uint4* x, const void* ids, const float* weights, const int* owners, Window* window, int ids_64,
                int tokens, int rows, int topk, int experts, int groups) {
    wait_for_previous_kernel();
    let_next_kernel_start();
#if QUANTIZE
    __shared__ float scales[kScales];  // of a token, and of the one before
    float* scale = scales;
#endif
    const ExpertIds owner{ids, owners, ids_64, 0, tokens * topk, topk, experts, window->ranks};
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp(), group_lane = lane % kGroupLanes;
    for (int token = blockIdx.x; token < rows; token += gridDim.x) {
        const i64 row = i64(window->rank) * rows + token;
        const auto load = [&](int group) {
            const bool exists = token < tokens && group < groups;
            return exists ? x[(i64(token) * groups + group) * kGroupLanes + group_lane] : make_uint4(0, 0, 0, 0);
        };
        // Two groups of channels per warp at once. Their loads do not wait for the ranks that need the token.
        int group = warp * kGroupsPerWarp + lane / kGroupLanes;
        uint4 next = load(group);
        push_ids(window, owner, weights, token, token < tokens, row);
        const u32 needed = ranks_of_token(owner, token);
        for (int first = warp * kGroupsPerWarp; needed && first < groups; first += kWarps * kGroupsPerWarp) {
            const bool exists = group < groups;
            const i64 to = (row * groups + group) * kGroupLanes + group_lane;
            const uint4 values = next;
            next = load(group + kWarps * kGroupsPerWarp);
#if QUANTIZE
            const float s = group_scale(group_max(magnitude_bits(values)));
            float v[8];
            unpack_eight(values, v);
            const Part part = quantize_eight(v, s);
            if (exists && group_lane == 0) scale[group] = s;
#else
            const Part part = values;
#endif
            for (int i = 0; i < window->ranks; ++i) {
                const int rank = window->peer(i);
                if (exists && needed >> rank & 1)
                    store_to_peer(window->in_window<Part>(rank, window->tokens) + to, part);
            }
            group += kWarps * kGroupsPerWarp;
        }
#if QUANTIZE
        __syncthreads();  // the scales are there; those of the token before have been read
        push_scales(window, scale, groups, needed, row);
        scale = scale == scales ? scales + MAX_GROUPS : scales;
#endif
    }
    finish_push(window);
}
