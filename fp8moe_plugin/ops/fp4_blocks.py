"""The 128x128 blocks of a weight in MXFP4, and by how much its exponents differ.

Groups of 32 channels whose codes are all zero have no exponent: theirs may be any number.
"""

from typing import NamedTuple

import torch

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.ops.tables import table

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; 8 to 15 are their negatives
LARGEST_EXPONENT, SPAN = 6, 14
CODES, EXPONENTS = GROUP // MXFP4.weight.block[1], GROUP // MXFP4.scales.block[1]  # bytes of a row of a block
MAGNITUDES = 0x77  # bits of two codes without their signs
WORD = 8  # bytes of codes that are compared with zero at once
WORDS = CODES // EXPONENTS // WORD  # of a group


class Range(NamedTuple):
    """The least and the largest exponent of a weight, also of codes that are all zero."""

    lowest: int
    highest: int

    @property
    def span(self) -> int:
        """By how much they differ at most."""
        return self.highest - self.lowest


class Fp4Blocks(NamedTuple):
    """A weight and its exponents in blocks, with zeros at the edges."""

    codes: torch.Tensor  # uint8 [row blocks, 128, K blocks, 64]
    exponent: torch.Tensor  # uint8 [row blocks, 128, K blocks, 4]

    @classmethod
    def of(cls, codes: torch.Tensor, exponents: torch.Tensor) -> "Fp4Blocks":
        """Divides a weight into blocks.

        Args:
            codes: uint8 `[N, K/2]`.
            exponents: `[N, K/32]`, uint8 or E8M0.
        """
        return cls(_blocks(codes, CODES), _blocks(exponents.view(torch.uint8), EXPONENTS))


class BelowLargest(NamedTuple):
    """The exponents of each block below its largest one."""

    below: torch.Tensor  # uint8 [row blocks, 128, K blocks, 4]; any for groups of zeros
    largest: torch.Tensor  # uint8 [row blocks, K blocks]
    span: int  # the largest of `below`, or a number up to `SPAN` that is not less

    @classmethod
    def of(cls, blocks: Fp4Blocks, most: int) -> "BelowLargest":
        """Finds the largest exponents. It waits for the device if `most` is more than `SPAN`.

        Only then does it look for groups of zeros. Otherwise their exponents count, as they are close to the others.

        Args:
            most: by how much the exponents differ at most.
        """
        exponent = blocks.exponent
        if most <= SPAN:
            largest, span = exponent.amax((1, 3), keepdim=True), most
            below = (largest - exponent).clamp_(max=SPAN)  # zeros at the edges are further below
        else:
            counted = nonzero_groups(blocks.codes)
            largest = (exponent * counted).amax((1, 3), keepdim=True)
            below = (largest - exponent) * counted
            span = int(below.max())
        return cls(below, largest[:, 0, :, 0], span)


def nonzero_groups(codes: torch.Tensor) -> torch.Tensor:
    """Returns for the codes of blocks which groups of them are not all zero: bool `[.., 4]` of uint8 `[.., 64]`."""
    magnitudes = codes.view(torch.int64) & int.from_bytes(bytes([MAGNITUDES]) * WORD, "little")
    return torch.logical_or(*magnitudes.unflatten(-1, (EXPONENTS, WORDS)).unbind(-1))


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
    return _bases(largest.device).index_select(0, largest.int().flatten()).view(largest.shape)


@table
def _bases(device: torch.device) -> torch.Tensor:
    """Returns the scale of each exponent; it is exact also below the smallest normal number."""
    biased = torch.arange(256) - LARGEST_EXPONENT
    bits = torch.where(biased > 0, biased << 23, 1 << (22 + biased.clamp(max=0)))
    return bits.to(torch.int32).view(torch.float32).to(device)
