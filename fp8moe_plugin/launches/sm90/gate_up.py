"""The launches of GEMM 1 of the experts, with its activation and the quantization of the result."""

from fp8moe_plugin.formats.activation import ActivationNumbers
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Rows, Weights
from fp8moe_plugin.launches.sm90.tensor_maps import gate_up_map, halves_map, rows_map
from fp8moe_plugin.launches.sm90.tiles import Tiles
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import cluster_of
from fp8moe_plugin.plan.sm90.constants import BOX_ROWS, SWIZZLE_ROWS, TAIL_ROWS


def gate_up_launch(
    key: KernelKey,
    blocks: int,
    a: Rows,
    w13: Weights,
    out: Rows,
    tiles: Tiles,
    activation: ActivationNumbers,
    *,
    a_rows: Address = 0,
) -> Launch:
    """Returns the launch of GEMM 1 of the experts with its activation, to quantized rows with K-major scales.

    If `tiles.done_counters` is set, the kernel counts the finished parts of its result there.

    Args:
        a_rows: address of int32 `[out.rows]`: row i of the tiles is row `a_rows[i]` of `a`, whose scales are then
            row-major. 0: the rows of the tiles are those of `a`.
    """
    return Launch(
        key,
        blocks,
        key.arguments(
            a_map=rows_map(a, BOX_ROWS),
            a_narrow_map=rows_map(a, TAIL_ROWS),
            b_map=halves_map(w13),
            d_map=rows_map(out, BOX_ROWS),
            a_scales=a.scales,
            a_scale_expert_stride=a.scale_group,
            a_scale_k_stride=a.scale_k_block,
            b_scales=w13.scales,
            gathered=a.values if a_rows else 0,
            a_rows=a_rows,
            d=out.values,
            d_scales=out.scales,
            done_counters=tiles.done_counters,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            m=out.rows,
            n=w13.n,
            k=w13.k,
            activation=activation,
            bias=w13.bias,
        ),
        cluster=cluster_of(key),
    )


def gate_up_few_rows_launch(
    key: KernelKey,
    blocks: int,
    a: Rows,
    w13: Weights,
    out: Rows,
    tiles: Tiles,
    activation: ActivationNumbers,
    *,
    a_rows: Address = 0,
    partial: Address = 0,
    k_splits: int = 1,
    row_counters: int = 1,
    pdl: bool = False,
) -> Launch:
    """Returns the launch of `gate_up_launch` by the kernel for few rows per expert.

    Args:
        partial: float32 `[k_splits, out.rows, 2 * out.k]`, partial sums of blocks that split K.
        k_splits: parts of K; several need `tiles.done_counters`.
        row_counters: counters of each row tile in `tiles.done_counters`.
        pdl: it may start before the preceding kernel ends, which quantizes `a`, or writes `tiles`.
    """
    return Launch(
        key,
        blocks,
        key.arguments(
            w_map=gate_up_map(w13),
            x_map=rows_map(a, 1 if a_rows else SWIZZLE_ROWS),
            x_scales=a.scales,
            x_scale_expert_stride=a.scale_group,
            x_scale_row_stride=a.scale_row,
            x_scale_k_stride=a.scale_k_block,
            w_scales=w13.scales,
            a_rows=a_rows,
            q=out.values,
            scales=out.scales,
            partial=partial if k_splits > 1 else 0,
            done_counters=tiles.done_counters,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            m=out.rows,
            intermediate=out.k,
            k=w13.k,
            splits=k_splits,
            counters_per_tile=row_counters,
            activation=activation,
            bias=w13.bias,
        ),
        pdl=pdl,
    )
