"""The launches of a mixture-of-experts layer: route, quantize, GEMM 1 with SwiGLU, GEMM 2, combine."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.ops.backend import Device
from fp8moe_plugin.ops.combine import combine_launch
from fp8moe_plugin.ops.gemm_launches import (
    gate_up_few_rows_launch,
    gate_up_launch,
    grouped_gemm_few_rows_launch,
    grouped_gemm_launch,
)
from fp8moe_plugin.ops.operands import LayerAddresses, Router, Rows, Tiles, Weights, placed
from fp8moe_plugin.ops.quantize import quantize_launch
from fp8moe_plugin.ops.route import Ids, Routing, route_launches, tiles_of_counts_launch
from fp8moe_plugin.ops.small_batch import small_batch_launches
from fp8moe_plugin.ops.triton_layers import triton_batched_launches, triton_layer_launches, triton_small_batch_launches
from fp8moe_plugin.plan import BatchedPlan, SmallBatchStep, SortedStep, StepPlan
from fp8moe_plugin.plan.constants import MANY_ROWS_TILE
from fp8moe_plugin.plan.scratch import SortedScratch
from fp8moe_plugin.plan.triton_step import TritonBatched, TritonSmallBatchStep, TritonStep, TritonStepPlan


def layer_launches(
    device: Device, tensors: LayerAddresses, step: StepPlan | TritonStepPlan, router: Router
) -> tuple[Launch, ...]:
    """The kernels of `fused_moe`.

    Args:
        step: from `plan_step` or `plan_triton_step`; the scratch has `step.scratch.nbytes` bytes.
    """
    if isinstance(step, TritonStep):
        return triton_layer_launches(tensors, step, router)
    if isinstance(step, TritonSmallBatchStep):
        return triton_small_batch_launches(tensors, step, router)
    if isinstance(step, SmallBatchStep):
        return small_batch_launches(tensors, step, router)
    return _sorted_launches(device, tensors, step, router)


def _sorted_launches(device: Device, tensors: LayerAddresses, step: SortedStep, router: Router) -> tuple[Launch, ...]:
    topk, hidden, intermediate, experts, _ = step.shape
    at = placed(step.scratch, tensors.scratch)
    ids = Ids(tensors.topk_ids, router.ids_64, tensors.expert_map, router.shared_expert)
    routing, routed = Routing(at.slots, at.tokens, at.num_rows), Tiles(at.table, at.num_tiles, at.done_counters)
    route = route_launches(
        ids, step.shape, step.tokens, at.expert_counts, routing, routed, step.tile_rows, step.row_counters
    )
    tiles = routed if step.early_down else Tiles(at.table, at.num_tiles)
    permuted = {} if step.gathers else {"slots": at.slots, "topk": topk}
    quantize = quantize_launch(
        step.quantize, tensors.hidden_states, at.x, at.x_scales, step.tokens, hidden, early=step.gathers, **permuted
    )
    w2 = Weights(tensors.w2, experts, hidden, intermediate, tensors.w2_scale)
    inner = Rows.k_major(at.inner, at.inner_scales, step.rows, intermediate)
    down = _down_launch(device, step, inner, w2, at.down, tiles)
    combine = combine_launch(
        at.down,
        at.slots,
        tensors.topk_weights,
        tensors.out,
        tokens=step.tokens,
        topk=topk,
        hidden=hidden,
        shared_expert=router.shared_expert,
        routed_scale=router.routed_scale,
        early=step.few_rows,  # the many blocks of a long step would each wait, and take longer than to start later
    )
    return *route, quantize, _gate_up_launch(device, tensors, step, at, inner, tiles), down, combine


def _gate_up_launch(
    device: Device, tensors: LayerAddresses, step: SortedStep, at: SortedScratch, inner: Rows, tiles: Tiles
) -> Launch:
    _, hidden, intermediate, experts, _ = step.shape
    w13 = Weights(tensors.w13, experts, 2 * intermediate, hidden, tensors.w13_scale)
    if not step.gathers:
        x = Rows.k_major(at.x, at.x_scales, step.rows, hidden)
        return gate_up_launch(device, step.gate_up, x, w13, inner, tiles)
    x = Rows.row_major(at.x, at.x_scales, step.tokens, hidden)
    if step.gate_up.source == "gate_up":
        return gate_up_launch(device, step.gate_up, x, w13, inner, tiles, a_rows=at.tokens)
    return gate_up_few_rows_launch(
        device,
        step.gate_up,
        x,
        w13,
        inner,
        tiles,
        a_rows=at.tokens,
        partial=at.partial,
        k_splits=step.k_splits,
        row_counters=step.row_counters,
        early=True,
    )


def _down_launch(device: Device, step: SortedStep, inner: Rows, w2: Weights, out: Address, tiles: Tiles) -> Launch:
    if step.down.source == "grouped_gemm":
        return grouped_gemm_launch(device, step.down, inner, w2, out, tiles, early=step.early_down)
    return grouped_gemm_few_rows_launch(
        device,
        step.down,
        inner,
        w2,
        out,
        tiles,
        columns=step.columns_at_once,
        row_counters=step.row_counters,
        early=step.early_down,
    )


def batched_launches(
    device: Device,
    plan: BatchedPlan | TritonBatched,
    x: Rows,
    w13: Weights,
    w2: Weights,
    counts: Address,
    out: Address,
    scratch: Address,
) -> list[Launch]:
    """The kernels of `batched_experts`, on the rows of `[experts, max_m]` that `counts` says; to `out`."""
    if isinstance(plan, TritonBatched):
        return triton_batched_launches(plan, x, w13, w2, counts, out, scratch)
    at = placed(plan.scratch, scratch)
    tiles = Tiles(at.table, at.num_tiles, at.done_counters)
    shared = tiles if plan.early_down else Tiles(at.table, at.num_tiles)
    inner = Rows.k_major(at.inner, at.inner_scales, x.rows, w2.k)
    return [
        tiles_of_counts_launch(counts, w2.experts, x.rows // w2.experts, tiles, MANY_ROWS_TILE),
        gate_up_launch(device, plan.gate_up, x, w13, inner, shared),
        grouped_gemm_launch(device, plan.down, inner, w2, out, shared, early=plan.early_down),
    ]
