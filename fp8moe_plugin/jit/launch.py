"""Launches as data: a kernel, its grid and its arguments. A slot stands for an address that only the call provides."""

from dataclasses import dataclass
from typing import NamedTuple

from fp8moe_plugin.formats.activation import ActivationNumbers
from fp8moe_plugin.plan.keys import KernelKey


@dataclass(frozen=True, slots=True)
class Slot:
    """The address at position `index` of a call's addresses, plus `offset` bytes."""

    index: int
    offset: int = 0

    def __add__(self, nbytes: int) -> "Slot":
        return Slot(self.index, self.offset + nbytes)


Address = int | Slot  # of device memory; 0 for none


class TensorMap(NamedTuple):
    """The content of a TMA descriptor (`CUtensorMap`) that swizzles 128 bytes."""

    address: Address
    sizes: tuple[int, ...]  # elements along each dimension, starting with the innermost, which is contiguous
    strides: tuple[int, ...]  # bytes between elements along each dimension, without the innermost
    box: tuple[int, ...]  # elements of a load or store along each dimension; 128 bytes along the innermost
    element_size: int  # bytes: 1, or 2 for bfloat16
    l2_fetch: int  # bytes that L2 fetches on a miss, 128 or 256


class Chunks(NamedTuple):
    """What kernels take in place of a descriptor of weights that are stored in chunks, see ops/mxfp4.py."""

    address: Address
    steps: int  # chunks of a row block along K
    further: int  # of them further steps
    groups: int = 0  # of w13: 128 channels each of an expert's gate projection


class PerGroup(NamedTuple):
    """An argument of a kernel for several groups: a descriptor or an int for each, up to `K_GROUPS` of them."""

    elements: tuple[TensorMap | int, ...]


Argument = TensorMap | Chunks | PerGroup | ActivationNumbers | Address | float


class Launch(NamedTuple):
    """A kernel launch for any stream.

    `pdl`: it may start before the preceding kernel has ended, as soon as that kernel allows it (programmatic
    dependent launch; csrc/device/common.cuh has the rules for such kernels).
    """

    key: KernelKey
    grid: int | tuple[int, int]  # blocks, along x or along (x, y)
    args: tuple[Argument, ...]  # from `key.arguments`; ints that are not addresses have 32 bits
    pdl: bool = False
    cluster: int = 1  # blocks per cluster along x, for kernels that do not fix it in their source
