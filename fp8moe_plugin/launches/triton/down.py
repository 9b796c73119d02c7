"""The launch of GEMM 2 of the experts."""

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Rows, Weights
from fp8moe_plugin.launches.triton.kernels import (
    ROW_TILES_AT_ONCE,
    TileTable,
    steps_of,
    triton_gemm_launch,
    triton_launch,
)
from fp8moe_plugin.plan.triton.catalog import TritonKey


def triton_down_launch(key: TritonKey, a: Rows, w2: Weights, out: Address, tiles: TileTable) -> Launch:
    """Returns the launch of GEMM 2 of the experts."""
    if w2.format is not PACKED_MXFP4:
        return triton_gemm_launch(key, a, w2, out, tiles)
    return triton_launch(
        key,
        tiles.tiles * (w2.n // GROUP),
        a=a.values,
        a_scales=a.scales,
        b=w2.values,
        b_scales=w2.scales,
        out=out,
        table=tiles.table,
        num_tiles=tiles.num_tiles,
        n=w2.n,
        k=w2.k,
        a_scale_row=a.scale_row,
        a_scale_group=a.scale_group,
        a_scale_k_block=a.scale_k_block,
        group_m=ROW_TILES_AT_ONCE,
        bias=w2.bias,
        **steps_of(w2),
    )
