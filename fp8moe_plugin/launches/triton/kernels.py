"""The launches of the Triton kernels, one by one."""

from typing import NamedTuple

from fp8moe_plugin.formats.activation import Activation, ActivationNumbers
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Argument, Launch
from fp8moe_plugin.launches.operands import Ids, LayerAddresses, Rows, Weights
from fp8moe_plugin.plan.scratch import scale_pitch
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.plan.triton.catalog import (
    COMBINE_CHANNELS,
    QUANTIZE_ROWS,
    TritonKey,
    combine_key,
    quantize_count_key,
    quantize_key,
    quantize_route_key,
    route_chunks,
    route_key,
    silu_mul_quant_key,
    tiles_of_counts_key,
    tiles_of_indices_key,
)

ROW_TILES_AT_ONCE = 16  # consecutive programs of a GEMM walk these column by column, so that weights stay in L2


class TileTable(NamedTuple):
    """The addresses of a tile table, see triton_kernels/route.py."""

    table: Address
    num_tiles: Address
    tiles: int  # capacity
    tile_rows: int


def steps_of(b: Weights) -> dict[str, Argument]:
    """Returns the argument of packed weights: the steps of K."""
    return {"steps": b.k // GROUP + b.further_steps} if b.format is PACKED_MXFP4 else {}


class TritonRouting(NamedTuple):
    """The row of each (token, expert) pair."""

    slots: Address  # int32 [T, topk]: the row of each pair, -1 for none
    tokens: Address  # int32 [T * topk]: the token of each row
    counts: Address  # scratch, see `triton_prepare_launches`


def triton_launch(key: TritonKey, grid: int, **arguments: Argument) -> Launch:
    """Returns a launch that uses programmatic dependent launch (PDL) if the target has it; the kernel waits inside."""
    return Launch(key, grid, key.arguments(**arguments), pdl=bool(dict(key.defines)["PDL"]))


def pairs_arguments(ids: Ids) -> dict[str, Argument]:
    """Returns the arguments from which `local_experts` of triton_kernels/route.py finds the experts of pairs."""
    return ids.arguments() | {"mapped": int(ids.expert_map != 0), "pairs": ids.pairs}


# ---- routing and quantization --------------------------------------------------------------------------------------


def triton_quantize_launch(target: str, ue8m0: bool, x: Address, out: Rows) -> Launch:
    """Returns the launch that quantizes bfloat16 `[rows, k]` at `x`."""
    return triton_launch(
        quantize_key(target, ue8m0),
        ceil_div(out.rows, QUANTIZE_ROWS) * (out.k // GROUP),
        x=x,
        q=out.values,
        scales=out.scales,
        tokens=out.rows,
        k=out.k,
        scale_row=out.scale_row,
        scale_k_block=out.scale_k_block,
    )


def triton_prepare_launches(
    target: str, hidden_states: Address, x: Rows, ids: Ids, routing: TritonRouting, tiles: TileTable
) -> list[Launch]:
    """Returns the launches that quantize a layer's tokens to `x`, with row-major scales, and give each pair a row.

    If tokens arrive quantized, they are `x`, and no program quantizes. Rows of an expert are consecutive, in the order
    of the pairs. The second element of `num_tiles` becomes the number of rows.

    Args:
        routing: its `counts` are int32 `[chunks, padded experts]`, unused for a single chunk.
    """
    experts, (chunks, parts) = ids.spec.shape.local_experts, route_chunks(ids.pairs)
    num_tokens, addresses = (0, (0, 0, 0)) if ids.spec.quantized else (x.rows, (hidden_states, x.values, x.scales))
    tokens = {"num_tokens": num_tokens, "k": x.k, **dict(zip(("x", "q", "scales"), addresses, strict=True))}
    common = pairs_arguments(ids)
    results = {
        "slots": routing.slots,
        "tokens": routing.tokens,
        "table": tiles.table,
        "num_tiles": tiles.num_tiles,
        "block_m": tiles.tile_rows,
    }
    key = (quantize_route_key if chunks == 1 else quantize_count_key)(target, ids.spec.ue8m0, experts)
    grid = chunks + ceil_div(num_tokens, dict(key.defines)["ROWS"]) * (x.k // GROUP)
    if chunks == 1:
        return [triton_launch(key, grid, **tokens, **common, **results)]
    counted = {"counts": routing.counts, "parts": parts}
    return [
        triton_launch(key, grid, **tokens, **common, **counted, slots=routing.slots, chunks=chunks),
        triton_launch(route_key(target, experts), chunks, **common, **results, **counted),
    ]


def triton_tiles_of_counts_launch(target: str, counts: Address, groups: int, max_m: int, tiles: TileTable) -> Launch:
    """Returns the launch that writes tiles of the first `counts[g]` rows of each group of `[groups, max_m]` rows.

    Counts are clamped to `[0, max_m]`.
    """
    return triton_launch(
        tiles_of_counts_key(target),
        1,
        counts=counts,
        table=tiles.table,
        num_tiles=tiles.num_tiles,
        groups=groups,
        max_m=max_m,
        block_m=tiles.tile_rows,
    )


def triton_tiles_of_indices_launch(target: str, indices: Address, rows: int, groups: int, tiles: TileTable) -> Launch:
    """Returns the launch that writes a tile for each run of equal ids in int32 `[rows]` at `indices`.

    Ids outside `[0, groups)` get no tile.
    """
    return triton_launch(
        tiles_of_indices_key(target),
        1,
        ids=indices,
        table=tiles.table,
        num_tiles=tiles.num_tiles,
        rows=rows,
        num_groups=groups,
        block_m=tiles.tile_rows,
    )


# ---- GEMMs ---------------------------------------------------------------------------------------------------------


def triton_gate_up_launch(
    key: TritonKey,
    a: Rows,
    w13: Weights,
    out: Rows,
    tiles: TileTable,
    activation: ActivationNumbers,
    *,
    a_rows: Address = 0,
) -> Launch:
    """Returns the launch of GEMM 1 of the experts with its activation, to quantized rows.

    With `a_rows`, row i reads row `a_rows[i]` of `a`, whose scales are row-major.
    """
    return triton_launch(
        key,
        tiles.tiles * (out.k // GROUP),
        a=a.values,
        a_scales=a.scales,
        a_rows=a_rows,
        b=w13.values,
        b_scales=w13.scales,
        q=out.values,
        scales=out.scales,
        table=tiles.table,
        num_tiles=tiles.num_tiles,
        channels=out.k,
        k=w13.k,
        a_scale_row=a.scale_row,
        a_scale_group=a.scale_group,
        a_scale_k_block=a.scale_k_block,
        scale_k_block=out.scale_k_block,
        gathered=int(a_rows != 0),
        group_m=ROW_TILES_AT_ONCE,
        **activation._asdict(),
        bias=w13.bias,
        **steps_of(w13),
    )


def triton_gemm_launch(
    key: TritonKey,
    a: Rows,
    b: Weights,
    out: Address,
    tiles: TileTable | None = None,
    *,
    a_rows: Address = 0,
    c: Address = 0,
) -> Launch:
    """Returns the launch of `out = a @ b.T (+ c)`, for the rows in `tiles` or for all rows.

    `a_rows`: see `triton_gate_up_launch`.
    """
    sizes = dict(key.defines)
    row_tiles = tiles.tiles if tiles else ceil_div(a.rows, sizes["BLOCK_M"])
    return triton_launch(
        key,
        row_tiles * ceil_div(b.n, sizes["BLOCK_N"]),
        a=a.values,
        a_scales=a.scales,
        a_rows=a_rows,
        b=b.values,
        b_scales=b.scales,
        c=c,
        out=out,
        table=tiles.table if tiles else 0,
        num_tiles=tiles.num_tiles if tiles else 0,
        m=a.rows,
        n=b.n,
        k=b.k,
        a_scale_row=a.scale_row,
        a_scale_group=a.scale_group,
        a_scale_k_block=a.scale_k_block,
        gathered=int(a_rows != 0),
        added=int(c != 0),
        grouped=int(tiles is not None),
        group_m=ROW_TILES_AT_ONCE,
        bias=b.bias,
    )


# ---- between and after the GEMMs -----------------------------------------------------------------------------------


def triton_silu_mul_quant_launch(
    target: str,
    ue8m0: bool,
    activation: Activation,
    gate_up: Address,
    counts: Address,
    groups: int,
    max_m: int,
    out: Rows,
) -> Launch:
    """Returns the launch that applies the activation to bfloat16 `[groups, max_m, 2I]` and quantizes the result.

    It processes the first `counts[g]` rows of each group.
    """
    key = silu_mul_quant_key(target, ue8m0, activation)
    return triton_launch(
        key,
        groups * ceil_div(max_m, QUANTIZE_ROWS) * (out.k // GROUP),
        gate_up=gate_up,
        counts=counts,
        q=out.values,
        scales=out.scales,
        max_m=max_m,
        channels=out.k,
        scale_k_block=scale_pitch(groups * max_m),
        **activation.numbers._asdict(),
    )


def triton_combine_launch(
    target: str, rows: Address, slots: Address, tensors: LayerAddresses, tokens: int, spec: LayerSpec
) -> Launch:
    """Returns the launch of the weighted sum of each token's rows; see `sm90.combine.combine_launch`."""
    topk, hidden, *_ = spec.shape
    return triton_launch(
        combine_key(target),
        tokens * ceil_div(hidden, COMBINE_CHANNELS),
        rows=rows,
        slots=slots,
        weights=tensors.topk_weights,
        out=tensors.out,
        hidden=hidden,
        topk=topk,
        weight_columns=spec.weight_columns,
        routed_scale=spec.routed_scale,
    )
