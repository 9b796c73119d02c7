// From the scores of 64 KV rows against all heads of kTokens tokens to a logit per row and token: the sum over the
// heads of relu(score) * weight, times the row's scale.
//
// Rows of the fragment are KV rows, its columns are (token, head). A thread sums up its columns, then the four lanes
// that share a row exchange their sums: each is left with other results, which are numbered 2 * token + row index.
#pragma once
#include "device/fragment.cuh"

// A score plus its magnitude is twice its relu, or NaN if the score is NaN. It takes the FMA pipe, which is twice as
// wide as the pipe for maxima. The scale of the row makes up for the factor; both are exact.
DEVICE float twice_relu(float score) { return score + fabsf(score); }

template <int kTokens>
struct HeadSums {
    static constexpr int kOctets = HEADS / 8;                                   // of columns of a token
    static constexpr int kSums = kTokens == 1 ? 2 : (2 * kTokens + 3) / 4 * 4;  // of a thread
    static constexpr int kResults = (kSums + 3) / 4;  // of a thread, when lanes have exchanged

    // Which token and which of the fragment's rows belongs to result i of this lane. Tokens from kTokens on are not
    // there, and of one token half of the lanes have no result.
    DEVICE static int token(int i) { return 2 * i + (threadIdx.x >> 1 & 1); }
    DEVICE static u32 row() { return warp_row(threadIdx.x) + lane_row(threadIdx.x) + row_offset(threadIdx.x & 1); }

    // `weights` are those of the thread's columns, `scale` those of the thread's two rows.
    DEVICE static void of_thread(const Fragment<kTokens * HEADS>& scores, const float (&weights)[kTokens * HEADS / 4],
                                 float2 scale, float (&sums)[kSums]) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            float part[4];  // by element of an octet
#pragma unroll
            for (int e = 0; e < 4 * kOctets; ++e) {
                const int at = t * 4 * kOctets + e;
                const float weight = weights[column_index(at)], relu = twice_relu(scores[at]);
                part[e % 4] = e < 4 ? weight * relu : fmaf(weight, relu, part[e % 4]);
            }
            sums[2 * t] = (part[0] + part[1]) * (0.5f * scale.x);
            sums[2 * t + 1] = (part[2] + part[3]) * (0.5f * scale.y);
        }
#pragma unroll
        for (int i = 2 * kTokens; i < kSums; ++i) sums[i] = 0.f;
    }

    DEVICE static void exchange_all(const float (&sums)[kSums], float (&result)[kResults]) {
        float pairs[kSums / 2];
        exchange<kSums>(sums, 1, pairs);
        if (kSums == 2)
            result[0] = pairs[0] + __shfl_xor_sync(kAllLanes, pairs[0], 2);
        else
            exchange<kSums / 2>(pairs, 2, result);
    }

   private:
    // Of each two sums a lane keeps one and adds the other lane's; the lane without the bit keeps the first.
    template <int kCount, int kKept>
    DEVICE static void exchange(const float (&sums)[kCount], int bit, float (&kept)[kKept]) {
        const bool second = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float mine = second ? sums[2 * i + 1] : sums[2 * i];
            const float other = second ? sums[2 * i] : sums[2 * i + 1];
            kept[i] = mine + __shfl_xor_sync(kAllLanes, other, bit);
        }
    }
};
