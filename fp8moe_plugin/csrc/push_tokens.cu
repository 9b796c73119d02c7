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
constexpr int kScales = 2 * MAX_GROUPS;

#if QUANTIZE
using Part = uint2;  // what a lane stores of a group
#else
using Part = uint4;
#endif

// Inputs are not __restrict__: the compiler could then move their loads above the wait.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    push_tokens(const uint4* x, const void* ids, const float* weights, const int* owners, Window* window, int ids_64,
                int tokens, int rows, int topk, int experts, int groups) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    __shared__ float scales[kScales];  // of a token, and of the one before
    const ExpertIds owner{ids, owners, ids_64, 0, tokens * topk, topk, experts, window->ranks};
    const int warp = threadIdx.x / kWarp, lane = lane_of_warp(), group_lane = lane % kGroupLanes;
    float* scale = scales;
    for (int token = blockIdx.x; token < rows; token += gridDim.x) {
        const i64 row = i64(window->rank) * rows + token;
        const u32 needed = ranks_of_token(owner, token);

        // The values: two groups of channels per warp.
        for (int first = warp * kGroupsPerWarp; needed && first < groups; first += kWarps * kGroupsPerWarp) {
            const int group = first + lane / kGroupLanes;
            const bool exists = group < groups;
            const uint4 values =
                exists ? x[(i64(token) * groups + group) * kGroupLanes + group_lane] : make_uint4(0, 0, 0, 0);
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
                    store_to_peer(window->in_window<Part>(rank, window->tokens) + (row * groups + group) * kGroupLanes +
                                      group_lane,
                                  part);
            }
        }
        __syncthreads();  // the scales are there; those of the token before have been read

        // The rest: a warp per rank.
        for (int i = warp; i < window->ranks; i += kWarps) {
            const int rank = window->peer(i);
            for (int column = lane; column < topk; column += kWarp) {
                const i64 to = row * topk + column;
                const float weight = token < tokens ? weights[i64(token) * topk + column] : 0.f;
                const int id = owner.id_of(token * topk + column);
                store_to_peer(window->in_window<u32>(rank, window->ids) + to, u32(id));
                store_to_peer(window->in_window<u32>(rank, window->weights) + to, __float_as_uint(weight));
            }
#if QUANTIZE
            if (needed >> rank & 1)
                for (int group = lane; group < groups; group += kWarp)
                    store_to_peer(window->in_window<u32>(rank, window->scales) + row * groups + group,
                                  __float_as_uint(scale[group]));
#endif
        }
        scale = scale == scales ? scales + MAX_GROUPS : scales;
    }
    finish_push(window);
}
