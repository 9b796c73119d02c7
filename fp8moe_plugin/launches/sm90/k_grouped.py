"""The launches of GEMMs of groups that differ in K."""

import itertools
from typing import NamedTuple

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch, PerGroup
from fp8moe_plugin.launches.sm90.tensor_maps import matrix_map, octets_map
from fp8moe_plugin.plan.parameters import K_GROUPS
from fp8moe_plugin.plan.sm90.catalog import k_grouped_gemm_key

BLOCK_M, BLOCK_N = 128, 176  # of the kernel's tiles


class KGroupedLayout(NamedTuple):
    """The shapes and strides of a call, in elements."""

    m: int
    n: int
    ks: tuple[int, ...]
    a_scale_k_block: int
    b_scale_k_block: int


class _Group(NamedTuple):
    ordinal: int  # index in C and D
    first_k: int  # the sum of K of the groups before it
    k: int


def k_grouped_launches(layout: KGroupedLayout, addresses: tuple[Address, ...], multiprocessors: int) -> list[Launch]:
    """Returns the launches of a call with at least one group that is not empty.

    A launch processes up to `K_GROUPS` groups. Groups with the largest K come first, so that the longest tiles do not
    run last.

    Args:
        addresses: of A, its scales, B, its scales, C and D.
    """
    begins = itertools.accumulate(layout.ks, initial=0)
    groups = [_Group(i, begin, k) for i, (begin, k) in enumerate(zip(begins, layout.ks, strict=False)) if k]
    groups.sort(key=lambda group: -group.k)
    size = ceil_div(len(groups), ceil_div(len(groups), K_GROUPS))
    parts = [groups[at : at + size] for at in range(0, len(groups), size)]
    return [_launch(layout, part, addresses, multiprocessors, pdl=part is not parts[0]) for part in parts]


def _launch(
    layout: KGroupedLayout, groups: list[_Group], addresses: tuple[Address, ...], multiprocessors: int, pdl: bool
) -> Launch:
    """Returns the launch for up to `K_GROUPS` groups, none of them empty."""
    a, a_scales, b, b_scales, c, d = addresses
    m, n, key = layout.m, layout.n, k_grouped_gemm_key()
    tiles = len(groups) * ceil_div(m, BLOCK_M) * ceil_div(n, BLOCK_N)
    return Launch(
        key,
        min(multiprocessors, tiles),
        key.arguments(
            a_maps=PerGroup(tuple(matrix_map(a + m * group.first_k, m, group.k, BLOCK_M) for group in groups)),
            b_maps=PerGroup(tuple(octets_map(b + n * group.first_k, n, group.k, BLOCK_N) for group in groups)),
            k_blocks=PerGroup(tuple(group.k // GROUP for group in groups)),
            first_k_blocks=PerGroup(tuple(group.first_k // GROUP for group in groups)),
            indices=PerGroup(tuple(group.ordinal for group in groups)),
            a_scales=a_scales,
            a_scale_k_stride=layout.a_scale_k_block,
            b_scales=b_scales,
            b_scale_k_stride=layout.b_scale_k_block,
            c=c,
            d=d,
            m=m,
            n=n,
            groups=len(groups),
        ),
        pdl,
    )
