"""The launches of whole calls on Triton kernels: a layer of experts, batched experts, grouped GEMMs, a dense layer."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Ids, LayerAddresses, Rows, Weights, placed
from fp8moe_plugin.launches.triton.down import triton_down_launch
from fp8moe_plugin.launches.triton.kernels import (
    TileTable,
    TritonRouting,
    triton_combine_launch,
    triton_gate_up_launch,
    triton_gemm_launch,
    triton_prepare_launches,
    triton_tiles_of_counts_launch,
    triton_tiles_of_indices_launch,
)
from fp8moe_plugin.launches.triton.small_batch import triton_down_small_batch_launch, triton_gate_up_small_batch_launch
from fp8moe_plugin.plan.spec import GroupedBy, Grouping
from fp8moe_plugin.plan.triton.plans import (
    TritonBatched,
    TritonDense,
    TritonGrouped,
    TritonSmallBatchStep,
    TritonStep,
    TritonStepPlan,
)


def layer_launches(step: TritonStepPlan, tensors: LayerAddresses, ids_64: bool) -> tuple[Launch, ...]:
    """Returns the launches of `fused_moe`; the scratch has `step.scratch.nbytes` bytes."""
    ids = Ids(tensors.topk_ids, ids_64, tensors.expert_map, step.tokens, step.spec)
    if isinstance(step, TritonSmallBatchStep):
        return _small_batch_launches(step, tensors, ids)
    return _sorted_launches(step, tensors, ids)


def _sorted_launches(step: TritonStep, tensors: LayerAddresses, ids: Ids) -> tuple[Launch, ...]:
    w13, w2 = tensors.weights(step.spec)
    at = placed(step.scratch, tensors.scratch)
    tiles = TileTable(at.table, at.num_tiles, step.tiles, step.tile_rows)
    routing = TritonRouting(at.slots, at.tokens, at.counts)
    arrived = tensors.hidden_states, tensors.hidden_scale
    x = Rows.row_major(*(arrived if step.spec.quantized else (at.x, at.x_scales)), step.tokens, w13.k)
    inner = Rows.k_major(at.inner, at.inner_scales, step.rows, w2.k)
    return (
        *triton_prepare_launches(step.target, tensors.hidden_states, x, ids, routing, tiles),
        triton_gate_up_launch(step.gate_up, x, w13, inner, tiles, step.spec.activation.numbers, a_rows=at.tokens),
        triton_down_launch(step.down, inner, w2, at.down, tiles),
        triton_combine_launch(step.target, at.down, at.slots, tensors, step.tokens, step.spec),
    )


def _small_batch_launches(step: TritonSmallBatchStep, tensors: LayerAddresses, ids: Ids) -> tuple[Launch, ...]:
    inner = placed(step.scratch, tensors.scratch).inner
    return (
        triton_gate_up_small_batch_launch(step.gate_up, tensors, ids, inner),
        triton_down_small_batch_launch(step.down, tensors, ids, inner),
    )


def batched_launches(
    plan: TritonBatched, x: Rows, w13: Weights, w2: Weights, counts: Address, out: Address, scratch: Address
) -> list[Launch]:
    """Returns the launches of `batched_experts` for the first `counts[e]` rows of each expert of `[experts, max_m]`."""
    at = placed(plan.scratch, scratch)
    tiles = TileTable(at.table, at.num_tiles, plan.tiles, plan.tile_rows)
    inner = Rows.k_major(at.inner, at.inner_scales, x.rows, w2.k)
    return [
        triton_tiles_of_counts_launch(plan.target, counts, w2.experts, x.rows // w2.experts, tiles),
        triton_gate_up_launch(plan.gate_up, x, w13, inner, tiles, plan.spec.activation.numbers),
        triton_down_launch(plan.down, inner, w2, out, tiles),
    ]


def grouped_launches(
    plan: TritonGrouped, grouping: Grouping, a: Rows, b: Weights, out: Address, layout: Address, scratch: Address
) -> list[Launch]:
    """Returns the launches of a grouped GEMM; `layout` is the address of what `grouping` names, which is not ENDS."""
    at = placed(plan.scratch, scratch)
    tiles = TileTable(at.table, at.num_tiles, plan.tiles, plan.tile_rows)
    if grouping.kind is GroupedBy.INDICES:
        first = triton_tiles_of_indices_launch(plan.target, layout, a.rows, b.experts, tiles)
    else:
        first = triton_tiles_of_counts_launch(plan.target, layout, b.experts, a.rows // b.experts, tiles)
    return [first, triton_gemm_launch(plan.kernel, a, b, out, tiles)]


def dense_launches(
    plan: TritonDense, a: Rows, b: Weights, out: Address, c: Address = 0, *, after_quantize: bool = False
) -> tuple[Launch]:
    """Returns the launch of `out = a @ b.T (+ c)`; each Triton kernel waits for the preceding kernel."""
    return (triton_gemm_launch(plan.kernel, a, b, out, c=c),)
