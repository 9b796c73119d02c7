// The bias of the experts' second GEMM in a small batch, whose sums are those of all experts of a token.
#pragma once
#include "device/fragment.cuh"
#include "routing/expert_ids.cuh"

// The sums of the biases of tokens' experts, times the router's weights. Rows of a fragment are channels, from
// `channel` on, its columns tokens.
template <int kTokens>
struct WeightedBiases {
    const float* bias;  // [experts, hidden]
    int hidden;
    const float* topk_weights;  // [tokens, weight_columns]; in a further column, a shared expert's, the weight is 1
    int weight_columns;
    float routed_scale;
    ExpertIds router;

    DEVICE void load(int channel, int tokens, Fragment<kTokens>& sum) const {
        const float* row = bias + channel + warp_row(threadIdx.x) + lane_row(threadIdx.x);
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) {
            const int token = fragment_column(threadIdx.x) + column_offset(i);
            for (int begin = 0; token < tokens && begin < router.topk; begin += kAtOnce)
                add(token, begin, row, sum[element_at(0, i)], sum[element_at(1, i)]);
        }
    }

   private:
    static constexpr int kAtOnce = 4;  // of a token's experts, whose loads are in flight together

    DEVICE void add(int token, int begin, const float* row, float& sum, float& other) const {
        int expert[kAtOnce];
        float weight[kAtOnce], value[kAtOnce][2];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int column = begin + j;
            expert[j] = column < router.topk ? router.id_of(token * router.topk + column) : kNoExpert;
            weight[j] = column < weight_columns ? topk_weights[token * weight_columns + column] * routed_scale : 1.f;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            expert[j] = router.here(expert[j]);
            if (expert[j] == kNoExpert) weight[j] = 0.f;  // even if it is NaN
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                value[j][r] = expert[j] == kNoExpert ? 0.f : row[i64(expert[j]) * hidden + row_offset(r)];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) sum += weight[j] * value[j][0], other += weight[j] * value[j][1];
    }
};
