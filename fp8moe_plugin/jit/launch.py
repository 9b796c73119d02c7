"""Launches as data: a kernel, its grid and its arguments. Addresses may be left open until the call."""

from dataclasses import dataclass
from typing import NamedTuple

from fp8moe_plugin.plan.keys import KernelKey


@dataclass(frozen=True, slots=True)
class Slot:
    """The address that a call gives at position `index`, plus `offset` bytes."""

    index: int
    offset: int = 0

    def __add__(self, nbytes: int) -> "Slot":
        return Slot(self.index, self.offset + nbytes)


Address = int | Slot  # of device memory; 0 for none


class TensorMap(NamedTuple):
    """What a TMA descriptor (`CUtensorMap`) says; it swizzles 128 bytes."""

    address: Address
    sizes: tuple[int, ...]  # elements along each dimension, the innermost first; its elements are contiguous
    strides: tuple[int, ...]  # bytes from one to the next along each dimension but the innermost
    box: tuple[int, ...]  # elements of a load or store along each dimension; 128 bytes along the innermost
    element_size: int  # bytes: 1, or 2 for bfloat16
    l2_fetch: int  # bytes that L2 fetches on a miss, 128 or 256


class PerGroup(NamedTuple):
    """An argument of a kernel for several groups: a descriptor or an int for each, up to `K_GROUPS` of them."""

    elements: tuple[TensorMap | int, ...]


Argument = TensorMap | PerGroup | Address | float


class Launch(NamedTuple):
    """A kernel launch for any stream.

    `pdl`: it may start before the preceding kernel has ended, as soon as that kernel allows it (programmatic
    dependent launch; csrc/device/common.cuh has the rules for such kernels).
    """

    key: KernelKey
    grid: int | tuple[int, int]  # blocks, along x or along (x, y)
    args: tuple[Argument, ...]  # from `key.arguments`; ints have 32 bits where they are no address
    pdl: bool = False
    cluster: int = 1  # blocks of a cluster along x, of a kernel that leaves that to its launch
