"""Random weights of a checkpoint, and weights in MXFP4."""

import math
import zlib

import torch

from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.ops.fp4_blocks import E2M1

GROUP = MXFP4.scales.block[1]
BIAS = 127


def draw(name: str, *shape: int, std: float | None = None, device: torch.device | None = None) -> torch.Tensor:
    """Returns float32 values that depend on the name and the kind of device alone; `std` None: of a linear layer."""
    generator = torch.Generator(device or "cpu").manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, device=device)
    return values * (1.5 / math.sqrt(shape[-1]) if std is None else std)


def rounded(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uint8 codes `[.., K/2]` and E8M0 exponents `[.., K/32]`, the smallest that hold their groups.

    Args:
        weights: `[.., K]`.
    """
    groups, values_of_codes = weights.unflatten(-1, (-1, GROUP)), torch.tensor(E2M1, device=weights.device)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / E2M1[-1])).clamp(min=-BIAS)
    scaled = (groups / torch.exp2(exponents)[..., None]).flatten(-2)
    codes = torch.bucketize(scaled.abs(), (values_of_codes[1:] + values_of_codes[:-1]) / 2) + 8 * (scaled < 0)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), (exponents + BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Returns the weights `[.., K]` exactly."""
    positive = torch.tensor(E2M1, device=codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    scales = torch.exp2(exponents.view(torch.uint8).float() - BIAS).repeat_interleave(GROUP, -1)
    return torch.cat([positive, -positive])[pairs] * scales
