"""The 128x128 blocks of a weight in MXFP4, and by how much the exponents of each differ.

Groups of 32 channels whose codes are all zero have no exponent: theirs may be any number.
"""

import functools
from typing import NamedTuple

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import MXFP4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; 8 to 15 are their negatives
LARGEST_EXPONENT, SPAN = 6, 14
CODES, EXPONENTS = GROUP // MXFP4.weight.block[1], GROUP // MXFP4.scales.block[1]  # bytes of a row of a block
MAGNITUDES = 0x77  # bits of two codes without their signs
WORD = 8  # bytes of codes that are compared with zero at once


class Fp4Blocks(NamedTuple):
    """A weight and its exponents in blocks, with zeros at the edges."""

    codes: torch.Tensor  # uint8 [row blocks, 128, K blocks, 64]
    exponent: torch.Tensor  # int32 [row blocks, 128, K blocks, 4]
    nonzero: torch.Tensor  # bool, likewise: whether a group has an exponent
    below: torch.Tensor  # int32, likewise: the largest exponent of the block minus the group's; 0 if it has none
    largest: torch.Tensor  # int32 [row blocks, K blocks]
    span: int  # the largest of `below`
    highest: int  # the largest exponent, also of groups that have none

    @classmethod
    def of(cls, codes: torch.Tensor, exponents: torch.Tensor) -> "Fp4Blocks":
        """Divides a weight into blocks. It waits for the device once.

        Args:
            codes: uint8 `[N, K/2]`.
            exponents: `[N, K/32]`, uint8 or E8M0.
        """
        packed, exponent = _blocks(codes, CODES), _blocks(exponents.view(torch.uint8), EXPONENTS).int()
        word = int.from_bytes(bytes([MAGNITUDES]) * WORD, "little")
        nonzero = (packed.view(torch.int64).unflatten(-1, (EXPONENTS, -1)) & word).any(-1)
        largest = (exponent * nonzero).amax((1, 3), keepdim=True)
        below = (largest - exponent) * nonzero
        found = exponent.new_empty(2)
        for i, values in enumerate((below, exponent)):
            torch.amax(values, (), out=found[i])
        span, highest = found.tolist()
        return cls(packed, exponent, nonzero, below, largest[:, 0, :, 0], span, highest)


def _blocks(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Returns bytes `[rows, columns]` as `[row blocks, 128, K blocks, width]`, zero-padded and aligned to `WORD`."""
    rows, columns = tensor.shape
    if rows % GROUP or columns % width:
        tensor = torch.nn.functional.pad(tensor, (0, -columns % width, 0, -rows % GROUP))
    tensor = tensor.contiguous()
    if tensor.data_ptr() % WORD or tensor.storage_offset() % WORD:
        tensor = tensor.clone()
    return tensor.view(-1, GROUP, tensor.shape[1] // width, width)


def bases(largest: torch.Tensor) -> torch.Tensor:
    """Returns the scales of blocks, float32 2^(exponent - 127 - `LARGEST_EXPONENT`), by their largest exponent."""
    return _bases(largest.device).index_select(0, largest.flatten()).view(largest.shape)


@functools.cache
def _bases(device: torch.device) -> torch.Tensor:
    """Returns the scale of each exponent; it is exact also below the smallest normal number."""
    biased = torch.arange(256) - LARGEST_EXPONENT
    bits = torch.where(biased > 0, biased << 23, 1 << (22 + biased.clamp(max=0)))
    return bits.to(torch.int32).view(torch.float32).to(device)
