"""The launches of the GEMMs: dense GEMMs, and GEMMs over row tiles of groups."""

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Rows, Weights
from fp8moe_plugin.launches.sm90.tensor_maps import matrix_map, rows_map, weights_map, whole_rows_l2_fetch
from fp8moe_plugin.launches.sm90.tiles import Tiles
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import cluster_of
from fp8moe_plugin.plan.sm90.constants import (
    BOX_ROWS,
    FEW_ROWS_TALL_BOX,
    FEW_ROWS_TILE_N,
    SWIZZLE_ROWS,
    TAIL_ROWS,
)
from fp8moe_plugin.plan.sm90.dense import DensePlan
from fp8moe_plugin.plan.sm90.grouped import GroupedPlan
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.plan.tuning import L2_FETCH, STREAMED_L2_FETCH

# ---- dense ---------------------------------------------------------------------------------------------------------


def dense_launches(
    plan: DensePlan, a: Rows, b: Weights, out: Address, c: Address = 0, *, after_quantize: bool = False
) -> tuple[Launch]:
    """Returns the launch of `out = a @ b.T (+ c)`; only some kinds of the plan's output allow `c`.

    Args:
        after_quantize: the preceding launch quantizes `a`, so this one may load weights before it has ended.
    """
    pdl = after_quantize and not plan.is_grouped
    match plan.kernel.source:
        case "dense_gemm_few_rows":
            return (_dense_few_rows_launch(plan, a, b, out, pdl),)
        case "dense_gemm":
            return (_dense_launch(plan, a, b, out, pdl),)
        case "dense_gemm_many_rows":
            return (_dense_many_rows_launch(plan, a, b, out, pdl),)
    return (grouped_gemm_launch(plan.kernel, plan.blocks, a, b, out, Tiles(), c=c),)


def _dense_operands(a: Rows, b: Weights, out: Address) -> dict[str, Address]:
    """Returns the arguments that all kernels for dense layers share."""
    return {
        "a_scales": a.scales,
        "a_scale_k_stride": a.scale_k_block,
        "b_scales": b.scales,
        "d": out,
        "m": a.rows,
        "n": b.n,
        "k": b.k,
        "bias": b.bias,
    }


def _dense_launch(plan: DensePlan, a: Rows, b: Weights, out: Address, pdl: bool) -> Launch:
    tail_rows = ceil_div(a.rows % plan.tile_rows, SWIZZLE_ROWS) * SWIZZLE_ROWS or plan.tile_rows
    return Launch(
        plan.kernel,
        plan.blocks,
        plan.kernel.arguments(
            a_map=rows_map(a, plan.tile_rows),
            a_tail_map=rows_map(a, tail_rows),
            b_map=weights_map(b, plan.tile_n, whole_rows_l2_fetch(b.k)),
            **_dense_operands(a, b, out),
            tile_n=plan.tile_n,
        ),
        pdl=pdl,
    )


def _dense_many_rows_launch(plan: DensePlan, a: Rows, b: Weights, out: Address, pdl: bool) -> Launch:
    cluster = dict(plan.kernel.defines)["CLUSTER"]
    return Launch(
        plan.kernel,
        plan.blocks,
        plan.kernel.arguments(
            a_map=rows_map(a, plan.tile_rows),
            b_map=weights_map(b, plan.tile_n // cluster, L2_FETCH),
            d_map=matrix_map(out, a.rows, b.n, BOX_ROWS, element_size=2),
            **_dense_operands(a, b, out),
        ),
        pdl=pdl,
    )


def _dense_few_rows_launch(plan: DensePlan, a: Rows, b: Weights, out: Address, pdl: bool) -> Launch:
    return Launch(
        plan.kernel,
        plan.blocks,
        plan.kernel.arguments(
            a_map=rows_map(a, plan.tile_rows),
            b_map=weights_map(b, plan.tile_n, STREAMED_L2_FETCH),
            **_dense_operands(a, b, out),
            tile_m=plan.tile_rows,
            splits=plan.cluster,
        ),
        pdl=pdl,
        cluster=plan.cluster,
    )


# ---- row tiles of groups -------------------------------------------------------------------------------------------


def grouped_launch(plan: GroupedPlan, a: Rows, b: Weights, out: Address, tiles: Tiles) -> Launch:
    """Returns the launch of `out[i] = a[i] @ b[expert of the tile].T` for the rows i of the tiles.

    `out` is bfloat16 `[rows, n]`.
    """
    if plan.tile.streams_weights:
        return grouped_gemm_few_rows_launch(
            plan.kernel, plan.blocks, a, b, out, tiles, columns=plan.columns_at_once, pdl=True
        )
    return grouped_gemm_launch(plan.kernel, plan.blocks, a, b, out, Tiles(tiles.table, tiles.num_tiles), pdl=True)


def grouped_gemm_launch(
    key: KernelKey,
    blocks: int,
    a: Rows,
    b: Weights,
    out: Address,
    tiles: Tiles,
    *,
    c: Address = 0,
    pdl: bool = False,
) -> Launch:
    """Returns the launch of `grouped_launch` by the kernel for many rows.

    Args:
        tiles: empty (`Tiles()`): all rows are one group.
        c: addend of a GEMM of one group; where rows are pushed (`pushed`), the pair of each row, and `out` is the
            window; else 0.
        pdl: it may start before the preceding kernel ends. With `tiles.done_counters` that kernel is the GEMM 1 that
            computes `a`: each tile waits for its rows, and `out` must not overlap with the operands of GEMM 1.
            Otherwise the kernel waits for the preceding one before it reads the tiles.
    """
    defines = dict(key.defines)
    a_map = rows_map(a, BOX_ROWS)
    # Only bfloat16 without an addend is stored through a map, if it is not pushed.
    stored = defines["OUTPUT"] == Output.BF16 and not c
    return Launch(
        key,
        blocks,
        key.arguments(
            a_map=a_map,
            a_narrow_map=rows_map(a, TAIL_ROWS),
            b_map=weights_map(b, defines["BLOCK_N"], L2_FETCH),
            d_map=matrix_map(out, a.rows, b.n, BOX_ROWS, element_size=2) if stored else a_map,
            a_scales=a.scales,
            a_scale_expert_stride=a.scale_group,
            a_scale_k_stride=a.scale_k_block,
            b_scales=b.scales,
            d=out,
            c=c,
            done_counters=tiles.done_counters if pdl else 0,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            m=a.rows,
            n=b.n,
            k=b.k,
            bias=b.bias,
        ),
        pdl=pdl,
        cluster=cluster_of(key),
    )


def grouped_gemm_few_rows_launch(
    key: KernelKey,
    blocks: int,
    a: Rows,
    b: Weights,
    out: Address,
    tiles: Tiles,
    *,
    columns: int,
    row_counters: int = 0,
    pdl: bool = False,
) -> Launch:
    """Returns the launch of `grouped_launch` by the kernel for few rows.

    Args:
        columns: column tiles that a block takes at once.
        row_counters: counters of each row tile in `tiles.done_counters`; 0: they are not used.
        pdl: it may start before the preceding kernel ends. That kernel is the GEMM 1 that computes `a` if
            `row_counters` is set, else the kernel that writes the tiles.
    """
    return Launch(
        key,
        blocks,
        key.arguments(
            a_map=rows_map(a, SWIZZLE_ROWS),
            a_tall_map=rows_map(a, FEW_ROWS_TALL_BOX),
            b_map=weights_map(b, FEW_ROWS_TILE_N, STREAMED_L2_FETCH),
            a_scales=a.scales,
            a_scale_expert_stride=a.scale_group,
            a_scale_k_stride=a.scale_k_block,
            b_scales=b.scales,
            d=out,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            m=a.rows,
            n=b.n,
            k=b.k,
            claim_pair=int(pdl),
            columns_at_once=columns,
            done_counters=tiles.done_counters if row_counters else 0,
            counters_per_tile=row_counters,
            bias=b.bias,
        ),
        pdl=pdl,
    )
