"""The launch that packs projections in MXFP4."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.plan.sm90.catalog import pack_mxfp4_key


def pack_mxfp4_launch(
    codes: Address,
    exponents: Address,
    chunks: Address,
    scales: Address,
    experts: int,
    given: tuple[int, int],
    blocks: tuple[int, int],
    further: int,
    part: tuple[int, int],
    largest: int,
) -> Launch:
    """Returns the launch that writes a projection of each expert to the tensors of w2 or w13.

    Args:
        given: the rows of a projection and the exponents of a row.
        blocks: blocks of 128 rows of a projection and of 128 channels of K in the tensors.
        further: further steps of the tensors.
        part: the projection's number among those that share the tensors, and how many do.
        largest: exponent of all projections.
    """
    key, (rows, groups), (row_blocks, k_blocks) = pack_mxfp4_key(), given, blocks
    args = key.arguments(
        codes=codes,
        exponents=exponents,
        chunks=chunks,
        scales=scales,
        rows=rows,
        groups=groups,
        row_blocks=row_blocks,
        k_blocks=k_blocks,
        further=further,
        part=part[0],
        parts=part[1],
        largest=largest,
    )
    return Launch(key, (row_blocks * (k_blocks + further), experts), args)
