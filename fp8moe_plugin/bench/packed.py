"""Random experts in MXFP4 for the benchmark: packed, and in block FP8 with the same values."""

import math

import torch

from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.ops.fp4_blocks import E2M1, Fp4Blocks
from fp8moe_plugin.ops.mxfp4 import steps_of, write_down, write_half
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized

BIAS, SPREAD = 127, 3  # of exponents; those of a row differ by less than SPREAD


def random_forms(experts: Experts, gen: torch.Generator) -> tuple[ExpertWeights, ExpertWeights]:
    """Returns experts, packed and in block FP8, whose weights keep activations near 1."""
    hidden, intermediate = experts.hidden, experts.intermediate
    with gen.device:
        packed, fp8 = (
            ExpertWeights.of(*expert_tensors(form, experts.experts, hidden, intermediate).values())
            for form in (PACKED_MXFP4, FP8_BLOCK)
        )
    for e in range(experts.experts):
        to, copy = packed.of_expert(e), fp8.of_expert(e)
        for half in (0, 1):
            codes, exponents = _random_projection(gen, intermediate, hidden)
            write_half(*to.w13, half, steps_of(Fp4Blocks.of(codes, exponents)))
            _write_block_fp8(_half(copy.w13, half), codes, exponents)
        codes, exponents = _random_projection(gen, hidden, intermediate)
        write_down(*to.w2, steps_of(Fp4Blocks.of(codes, exponents)))
        _write_block_fp8(copy.w2, codes, exponents)
    return packed, fp8


def _random_projection(gen: torch.Generator, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes `[n, k/2]` and exponents `[n, k/32]`."""
    shapes = ([n, k // tensor.block[1]] for tensor in (MXFP4.weight, MXFP4.scales))
    codes, below = (
        torch.randint(most, shape, generator=gen, device=gen.device, dtype=torch.uint8)
        for most, shape in zip((256, SPREAD), shapes, strict=True)
    )
    mean_square = sum(value**2 for value in E2M1) / len(E2M1)
    return codes, BIAS + SPREAD // 2 - round(math.log2(k * mean_square) / 2) - below


def _half(w13: Quantized, half: int) -> Quantized:
    q, scales = (tensor.chunk(2)[half] for tensor in w13)
    return q, scales


def _write_block_fp8(to: Quantized, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    for own, tensor in zip(to, block_fp8("w", codes, exponents.view(torch.float8_e8m0fnu)), strict=True):
        own.copy_(tensor)
