"""What a weight format consists of: a tensor of weights `[.., N, K]`, and a tensor of their scales."""

import math
from dataclasses import dataclass
from enum import StrEnum

from fp8moe_plugin.formats.dtypes import DTYPES


class Role(StrEnum):
    """Which of the tensors of a quantized weight a parameter holds."""

    WEIGHT = "weight"
    SCALES = "scales"


@dataclass(frozen=True)
class TensorFormat:
    """One of the tensors of a quantized weight. Names of dtypes are those of safetensors."""

    dtype: str  # of the parameter that kernels read
    accepted: tuple[str, ...]  # dtypes in checkpoints, whose values `dtype` holds exactly
    block: tuple[int, int]  # output and input channels for each element

    def shape(self, n: int, k: int) -> list[int]:
        """The shape of this tensor for a weight `[n, k]`, whose last blocks may be smaller."""
        return [ceil_div(size, side) for size, side in zip((n, k), self.block, strict=True)]

    def nbytes(self, n: int, k: int) -> int:
        return math.prod(self.shape(n, k)) * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True)
class WeightFormat:
    """How a quantized weight is stored in a checkpoint, and laid out for the kernels."""

    name: str  # as messages call it
    weight: TensorFormat
    scales: TensorFormat
    scale_names: tuple[str, ...]  # what the names of scales end with in checkpoints

    def __hash__(self) -> int:
        return hash(self.name)  # fast: every call of a layer hashes its format

    def tensor(self, role: Role) -> TensorFormat:
        return self.weight if role is Role.WEIGHT else self.scales

    def nbytes(self, n: int, k: int) -> int:
        """The bytes of a weight `[n, k]` and of its scales."""
        return sum(tensor.nbytes(n, k) for tensor in (self.weight, self.scales))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
