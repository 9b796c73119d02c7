"""Random experts in MXFP4, and the same weights in the formats of our kernels: packed, and in block FP8."""

import torch

from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.recode import block_fp8
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized
from fp8moe_plugin.ops.pack_mxfp4 import pack_mxfp4

LARGEST_BELOW = 3  # of the exponents of a row, all of which Humming then represents exactly
BIAS = 127


def random_mxfp4(experts: Experts, device: torch.device) -> ExpertWeights:
    """Returns uniform codes `[E, N, K/2]` and exponents `[E, N, K/32]` that keep activations near 1."""
    gen = torch.Generator(device).manual_seed(0)

    def draw(n: int, k: int) -> Quantized:
        def integers(end: int, columns: int) -> torch.Tensor:
            shape = (experts.experts, n, k // columns)
            return torch.randint(end, shape, generator=gen, device=device, dtype=torch.uint8)

        largest = BIAS - k.bit_length() // 2 - 1
        return integers(256, MXFP4.weight.block[1]), largest - integers(LARGEST_BELOW + 1, MXFP4.scales.block[1])

    return ExpertWeights(draw(2 * experts.intermediate, experts.hidden), draw(experts.hidden, experts.intermediate))


def in_block_fp8(weights: ExpertWeights) -> ExpertWeights:
    """Returns the same weights in block FP8."""

    def recoded(codes: torch.Tensor, exponents: torch.Tensor) -> Quantized:
        each = zip(codes, exponents.view(torch.float8_e8m0fnu), strict=True)
        q, scales = zip(*(block_fp8("w", *expert) for expert in each), strict=True)
        return torch.stack(q), torch.stack(scales)

    return ExpertWeights(*(recoded(*weight) for weight in weights[:2]))


def packed(weights: ExpertWeights) -> ExpertWeights:
    """Returns the same weights in the order of our kernels. No block needs further steps."""
    experts, hidden, columns = weights.w2[0].shape
    with weights.w2[0].device:
        tensors = expert_tensors(PACKED_MXFP4, experts, hidden, 2 * columns)
    found = ExpertWeights.of(*tensors.values())
    gates, ups = zip(*(tensor.chunk(2, 1) for tensor in weights.w13), strict=True)
    for shard_id, to, both in (("w1", found.w13, gates), ("w3", found.w13, ups), ("w2", found.w2, weights.w2)):
        codes, exponents = (tensor.flatten(0, 1) for tensor in both)
        pack_mxfp4(*to, shard_id, codes, exponents, int(exponents.max()))
    return found
