// The activation of the experts: its arithmetic, and how it is applied to each layout of gate and up. Another one is an
// edit of this file, of plan/parameters.py and of formats/activation.py.
//
// MODIFIED_SWIGLU: 0 is SiLU(gate) * up. The sums are rounded to bfloat16 first, SiLU and the product are each rounded
//                  to bfloat16, as in vLLM's kernels.
//                  1 has limits, alpha and beta. It is float32 from the sums on, and only its result is rounded to
//                  bfloat16; silu_mul_quant.cu reads sums that are bfloat16 already.
#pragma once
#include "device/common.cuh"

// x / (1 + e^(-alpha * x)), accurate to about 2^-20: this changes less than one bfloat16 result in 10,000.
DEVICE float silu(float x, float alpha = 1.0f) {
    constexpr float kLog2E = 1.44269504f;
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * (alpha * -kLog2E)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return x * inverse;
}

// The lesser of both, or NaN.
DEVICE float at_most(float x, float limit) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));
    return x;
}

// x with at most this magnitude, or NaN. The limit is positive.
DEVICE float at_most_in_magnitude(float x, float limit) {
    asm("min.NaN.xorsign.abs.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));
    return x;
}

// The last parameter of each kernel. Infinity where there is no limit; not read unless MODIFIED_SWIGLU.
struct Activation {
    float gate_limit, activated_limit, up_limit, alpha, beta;

    // Of two sums of each projection.
    DEVICE u32 operator()(float2 gate, float2 up) const {
        if (MODIFIED_SWIGLU) return pack_bf16x2(modified(gate.x, up.x), modified(gate.y, up.y));
        return silu_mul(pack_bf16x2(gate.x, gate.y), pack_bf16x2(up.x, up.y));
    }

    // Gate and up projection have an accumulator each: elements 2 * pair and the next.
    template <int kCount>
    DEVICE u32 of_pair(const float (&gate)[kCount], const float (&up)[kCount], int pair) const {
        return (*this)(make_float2(gate[2 * pair], gate[2 * pair + 1]), make_float2(up[2 * pair], up[2 * pair + 1]));
    }

    // Gate and up projection of a channel are the two rows of one accumulator: elements of the pair's two columns.
    template <int kCount>
    DEVICE u32 of_pair(const float (&sum)[kCount], int pair) const {
        const float* s = sum + 4 * pair;
        return (*this)(make_float2(s[0], s[1]), make_float2(s[2], s[3]));
    }

    // Sums of four neighbouring channels of a token.
    DEVICE uint2 of_four(float4 gate, float4 up) const {
        return make_uint2((*this)(make_float2(gate.x, gate.y), make_float2(up.x, up.y)),
                          (*this)(make_float2(gate.z, gate.w), make_float2(up.z, up.w)));
    }

    // Eight neighbouring channels of a token that are bfloat16 already.
    DEVICE uint4 of_eight(uint4 gate, uint4 up) const {
        return make_uint4(of_bf16(gate.x, up.x), of_bf16(gate.y, up.y), of_bf16(gate.z, up.z), of_bf16(gate.w, up.w));
    }

   private:
    DEVICE u32 of_bf16(u32 gate, u32 up) const {
        return MODIFIED_SWIGLU ? (*this)(unpack_bf16x2(gate), unpack_bf16x2(up)) : silu_mul(gate, up);
    }
    DEVICE static u32 silu_mul(u32 gate, u32 up) {
        const float2 g = unpack_bf16x2(gate);
        u32 product;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pack_bf16x2(silu(g.x), silu(g.y))), "r"(up));
        return product;
    }
    DEVICE float modified(float gate, float up) const {
        const float activated = at_most(silu(at_most(gate, gate_limit), alpha), activated_limit);
        return activated * (at_most_in_magnitude(up, up_limit) + beta);
    }
};
