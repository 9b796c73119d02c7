"""A weight format: a tensor of weights `[.., N, K]`, and a tensor of their scales."""

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8moe_plugin.formats.dtypes import DTYPES

WHOLE_ROW = sys.maxsize  # input channels of a block that ends with its row, however long


class Role(StrEnum):
    """The role of a tensor in a quantized weight."""

    WEIGHT = "weight"
    SCALES = "scales"

    @property
    def other(self) -> "Role":
        return Role.SCALES if self is Role.WEIGHT else Role.WEIGHT


@dataclass(frozen=True)
class TensorFormat:
    """One of the tensors of a quantized weight. Names of dtypes are those of safetensors."""

    dtype: str  # of the parameter that kernels read
    accepted: tuple[str, ...]  # dtypes in checkpoints; `dtype` represents their values exactly
    block: tuple[int, int]  # output and input channels for each element
    elements: int = 1  # elements of a block, which are consecutive
    further: int = 0  # blocks that a further step takes, see ops/mxfp4.py; 0: there are none

    @property
    def part(self) -> str:
        """The part of a weight that one element stands for, in messages."""
        rows, columns = self.block
        return "row" if columns == WHOLE_ROW else f"{rows}x{columns} block"

    def shape(self, n: int, k: int, further_steps: int = 0) -> list[int]:
        """Returns the shape of this tensor for a weight `[n, k]`, whose last blocks may be smaller."""
        rows, columns = (ceil_div(size, side) for size, side in zip((n, k), self.block, strict=True))
        return [rows, (columns + further_steps * self.further) * self.elements]

    def further_steps(self, shape: Sequence[int], k: int) -> int:
        """Returns the number of further steps of a tensor of this shape for a weight `[.., n, k]`."""
        return (shape[-1] // self.elements - ceil_div(k, self.block[1])) // self.further if self.further else 0

    def file_shape(self, dtype: str, n: int, k: int) -> list[int]:
        """Returns the shape in a safetensors file with this dtype: it counts values, also where torch counts bytes."""
        *rows, columns = self.shape(n, k)
        return [*rows, columns * max(1, 8 // DTYPES[dtype].bits)]

    def channels(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns `[.., n, k]` of the weights whose tensor, in whole blocks, has this shape.

        Further steps count as channels of `k`.

        Raises:
            ValueError: the blocks are whole rows, so the shape does not imply `k`.
        """
        if WHOLE_ROW in self.block:
            raise ValueError(f"no number of channels follows from {list(shape)} of a tensor with whole rows as blocks")
        *leading, n, k = shape
        return *leading, n * self.block[0], k // self.elements * self.block[1]

    def nbytes(self, n: int, k: int) -> int:
        return math.prod(self.shape(n, k)) * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True)
class WeightFormat:
    """The storage of a quantized weight in a checkpoint, and its layout for the kernels."""

    name: str  # in messages
    weight: TensorFormat
    scales: TensorFormat
    scale_names: tuple[str, ...]  # suffixes of scales' names in checkpoints

    def __post_init__(self) -> None:
        _NAMED[self.name] = self

    def __reduce__(self) -> tuple[object, ...]:
        """Formats are compared by identity: a copy, also one that another process unpickles, is the format itself."""
        return _named, (self.name,)

    def __hash__(self) -> int:
        return hash(self.name)  # fast: every call of a layer hashes its format

    @property
    def weight_block(self) -> list[int] | None:
        """The sides of the blocks that share a scale, as engines describe them, or None if a whole row does."""
        return None if WHOLE_ROW in self.scales.block else list(self.scales.block)

    def tensor(self, role: Role) -> TensorFormat:
        return self.weight if role is Role.WEIGHT else self.scales

    def nbytes(self, n: int, k: int) -> int:
        """Returns the bytes of a weight `[n, k]` and of its scales."""
        return sum(tensor.nbytes(n, k) for tensor in (self.weight, self.scales))


_NAMED: dict[str, WeightFormat] = {}


def _named(name: str) -> WeightFormat:
    importlib.import_module("fp8moe_plugin.formats.spec")  # all formats of this package
    return _NAMED[name]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
