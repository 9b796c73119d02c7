"""Quantization and activation, rounded as in csrc/device/fp8.cuh and in ops/reference.py."""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
SMALLEST_AMAX_BITS = tl.constexpr(0x2EDBE6FF)  # of 1e-10, which keeps the scale of an all-zero group finite
LOG2_E = tl.constexpr(1.44269504)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def divide(a, b, inverse):
    """`a / b`, correctly rounded from the correctly rounded `inverse` of b, as in csrc/device/fp8.cuh.

    It loses the sign of zero and gives NaN for infinite b.
    """
    quotient = a * inverse
    return tl.fma(tl.fma(-quotient, b, a), inverse, quotient)


@triton.jit
def quantized(values, UE8M0: tl.constexpr):
    """e4m3 `[R, 128]` and float32 scales `[R]` of bfloat16 `[R, 128]`; NaN or infinity spoils its row."""
    # The bits of non-negative floats are ordered as the floats, NaN above all: integer maxima propagate NaN.
    magnitudes = values.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    amax = tl.maximum(tl.max(magnitudes, 1) << 16, SMALLEST_AMAX_BITS).to(tl.float32, bitcast=True)
    largest = tl.full(amax.shape, FP8_MAX, tl.float32)
    scales = divide(amax, largest, 1.0 / FP8_MAX)
    if UE8M0:
        scales = ((scales.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    inverses = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    divisors = tl.broadcast_to(scales[:, None], values.shape)
    codes = divide(values.to(tl.float32), divisors, tl.broadcast_to(inverses[:, None], values.shape))
    return codes.to(tl.float8e4nv), scales


@triton.jit
def silu(x, alpha):
    """`x * sigmoid(alpha * x)` of float32."""
    inverse = 1.0 / (1.0 + tl.exp2(x * (alpha * -LOG2_E)))  # as in csrc, where dividing x would give other bits
    return x * tl.where(inverse < SMALLEST_NORMAL, 0.0, inverse)  # csrc has no subnormal ones


@triton.jit
def activated(gate, up, gate_limit, activated_limit, up_limit, alpha, beta, MODIFIED_SWIGLU: tl.constexpr):
    """The activation of float32 sums, or of sums that are bfloat16 already, as bfloat16: see `ActivationNumbers`.

    Plain `silu(gate) * up` rounds sums, SiLU and the product to bfloat16, a modified SwiGLU only its result.
    """
    if MODIFIED_SWIGLU:
        every: tl.constexpr = tl.PropagateNan.ALL
        limited = tl.minimum(gate.to(tl.float32), gate_limit, propagate_nan=every)
        inner = tl.minimum(silu(limited, alpha), activated_limit, propagate_nan=every)
        result = inner * (tl.clamp(up.to(tl.float32), -up_limit, up_limit, propagate_nan=every) + beta)
    else:
        inner = silu(gate.to(tl.bfloat16).to(tl.float32), 1.0).to(tl.bfloat16)
        result = inner.to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)
    return result.to(tl.bfloat16)
