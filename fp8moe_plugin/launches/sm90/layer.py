"""The launches of a mixture-of-experts layer: route, quantize, GEMM 1 with SwiGLU, GEMM 2, combine."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Ids, LayerAddresses, Rows, Weights, placed
from fp8moe_plugin.launches.sm90.combine import combine_launch
from fp8moe_plugin.launches.sm90.gate_up import gate_up_few_rows_launch, gate_up_launch
from fp8moe_plugin.launches.sm90.gemm import (
    grouped_gemm_few_rows_launch,
    grouped_gemm_launch,
)
from fp8moe_plugin.launches.sm90.quantize import quantize_launch
from fp8moe_plugin.launches.sm90.route import Routing, route_launches
from fp8moe_plugin.launches.sm90.small_batch import small_batch_launches
from fp8moe_plugin.launches.sm90.tiles import Tiles, tiles_of_counts_launch
from fp8moe_plugin.plan.sm90.grouped import BatchedPlan
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep, StepPlan
from fp8moe_plugin.plan.sm90.scratch import SortedScratch


def layer_launches(step: StepPlan, tensors: LayerAddresses, ids_64: bool, window: Address = 0) -> tuple[Launch, ...]:
    """Returns the launches of `fused_moe`; the scratch has `step.scratch.nbytes` bytes.

    Args:
        window: of this rank, where GEMM 2 `pushes_rows`: it is the last launch then.
    """
    if isinstance(step, SmallBatchStep):
        return small_batch_launches(step, tensors, ids_64)
    return _sorted_launches(step, tensors, ids_64, window)


def _sorted_launches(step: SortedStep, tensors: LayerAddresses, ids_64: bool, window: Address) -> tuple[Launch, ...]:
    topk, hidden, intermediate, _, _ = step.spec.shape
    w13, w2 = tensors.weights(step.spec)
    at = placed(step.scratch, tensors.scratch)
    ids = Ids(tensors.topk_ids, ids_64, tensors.expert_map, step.tokens, step.spec)
    routing = Routing(at.slots, at.tokens, at.num_rows, numbers_pairs=step.pushes_rows)
    routed = Tiles(at.table, at.num_tiles, at.done_counters)
    route = route_launches(ids, at.expert_counts, routing, routed, step.tile.rows, step.row_counters)
    tiles = routed if step.pdl_down else Tiles(at.table, at.num_tiles)
    x, quantize = _rows_of_tokens(step, tensors, at)
    inner = Rows.k_major(at.inner, at.inner_scales, step.rows, intermediate)
    if step.pushes_rows:
        down = _down_launch(step, inner, w2, window, tiles, pairs=at.tokens)
        return *route, *quantize, _gate_up_launch(x, w13, step, at, inner, tiles), down
    down = _down_launch(step, inner, w2, at.down, tiles)
    combine = combine_launch(
        at.down,
        at.slots,
        tensors.topk_weights,
        tensors.out,
        tokens=step.tokens,
        topk=topk,
        hidden=hidden,
        weight_columns=step.spec.weight_columns,
        routed_scale=step.spec.routed_scale,
        pdl=step.tile.streams_weights,  # with many blocks, waiting inside each one costs more than a late start
    )
    return *route, *quantize, _gate_up_launch(x, w13, step, at, inner, tiles), down, combine


def _rows_of_tokens(step: SortedStep, tensors: LayerAddresses, at: SortedScratch) -> tuple[Rows, list[Launch]]:
    """Returns the rows that GEMM 1 reads, and the launches that make them: none if they are the tokens of the call."""
    topk, hidden, *_ = step.spec.shape
    scales = tensors.hidden_scale if step.spec.quantized else 0
    if step.quantize is None:
        return Rows.row_major(tensors.hidden_states, scales, step.tokens, hidden), []
    if step.gathers:
        x, permuted = Rows.row_major(at.x, at.x_scales, step.tokens, hidden), {}
    else:
        x, permuted = Rows.k_major(at.x, at.x_scales, step.rows, hidden), {"slots": at.slots, "topk": topk}
    quantize = quantize_launch(
        step.quantize,
        tensors.hidden_states,
        x.values,
        x.scales,
        step.tokens,
        hidden,
        x_scales=scales,
        pdl=step.gathers,
        **permuted,
    )
    return x, [quantize]


def _gate_up_launch(x: Rows, w13: Weights, step: SortedStep, at: SortedScratch, inner: Rows, tiles: Tiles) -> Launch:
    activation = step.spec.activation.numbers
    first = step.gate_up, step.blocks, x, w13, inner, tiles, activation
    a_rows = at.tokens if step.gathers else 0
    if not step.tile.streams_weights:
        return gate_up_launch(*first, a_rows=a_rows)
    return gate_up_few_rows_launch(
        *first,
        a_rows=a_rows,
        partial=at.partial,
        k_splits=step.k_splits,
        row_counters=step.row_counters,
        pdl=True,
    )


def _down_launch(step: SortedStep, inner: Rows, w2: Weights, out: Address, tiles: Tiles, pairs: Address = 0) -> Launch:
    if step.down.source == "grouped_gemm":
        return grouped_gemm_launch(step.down, step.down_blocks, inner, w2, out, tiles, c=pairs, pdl=step.pdl_down)
    return grouped_gemm_few_rows_launch(
        step.down,
        step.down_blocks,
        inner,
        w2,
        out,
        tiles,
        columns=step.columns_at_once,
        row_counters=step.row_counters,
        pdl=step.pdl_down,
    )


def batched_launches(
    plan: BatchedPlan,
    x: Rows,
    w13: Weights,
    w2: Weights,
    counts: Address,
    out: Address,
    scratch: Address,
) -> list[Launch]:
    """Returns the launches of `batched_experts` for the first `counts[e]` rows of each expert of `[experts, max_m]`."""
    at = placed(plan.scratch, scratch)
    tiles = Tiles(at.table, at.num_tiles, at.done_counters)
    cut = tiles_of_counts_launch(counts, w2.experts, x.rows // w2.experts, tiles, plan.tile.rows)
    shared = tiles if plan.pdl_down else Tiles(at.table, at.num_tiles)
    inner = Rows.k_major(at.inner, at.inner_scales, x.rows, w2.k)
    first = plan.gate_up, plan.blocks, x, w13, inner, shared, plan.spec.activation.numbers
    second = plan.down, plan.down_blocks, inner, w2, out, shared
    if not plan.tile.streams_weights:
        return [cut, gate_up_launch(*first), grouped_gemm_launch(*second, pdl=plan.pdl_down)]
    return [
        cut,
        gate_up_few_rows_launch(*first, pdl=True),
        grouped_gemm_few_rows_launch(*second, columns=plan.columns_at_once, row_counters=1, pdl=True),
    ]
