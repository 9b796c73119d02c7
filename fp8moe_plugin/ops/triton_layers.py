"""The launches of whole calls on Triton kernels: a layer of experts, batched experts, grouped GEMMs, a dense layer."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.ops.operands import LayerAddresses, Router, Rows, Weights, placed
from fp8moe_plugin.ops.route import Ids
from fp8moe_plugin.ops.triton_launches import (
    Routing,
    Table,
    triton_combine_launch,
    triton_gate_up_launch,
    triton_gemm_launch,
    triton_prepare_launches,
    triton_tiles_of_counts_launch,
    triton_tiles_of_indices_launch,
)
from fp8moe_plugin.ops.triton_small_batch import triton_down_small_batch_launch, triton_gate_up_small_batch_launch
from fp8moe_plugin.plan.triton_step import TritonBatched, TritonGrouped, TritonSmallBatchStep, TritonStep


def triton_layer_launches(tensors: LayerAddresses, step: TritonStep, router: Router) -> tuple[Launch, ...]:
    """The kernels of `fused_moe`; see `moe_launches.layer_launches`."""
    _, hidden, intermediate, experts, _ = step.shape
    at = placed(step.scratch, tensors.scratch)
    tiles = Table(at.table, at.num_tiles, step.tiles, step.tile_rows)
    ids = Ids(tensors.topk_ids, router.ids_64, tensors.expert_map, router.shared_expert)
    routing = Routing(at.slots, at.tokens, at.counts)
    x = Rows.row_major(at.x, at.x_scales, step.tokens, hidden)
    w13 = Weights(tensors.w13, experts, 2 * intermediate, hidden, tensors.w13_scale)
    w2 = Weights(tensors.w2, experts, hidden, intermediate, tensors.w2_scale)
    inner = Rows.k_major(at.inner, at.inner_scales, step.rows, intermediate)
    return (
        *triton_prepare_launches(step.target, step.ue8m0, tensors.hidden_states, x, ids, step.shape, routing, tiles),
        triton_gate_up_launch(step.gate_up, x, w13, inner, tiles, a_rows=at.tokens),
        triton_gemm_launch(step.down, inner, w2, at.down, tiles),
        triton_combine_launch(step.target, at.down, at.slots, tensors, step.tokens, step.shape, router),
    )


def triton_small_batch_launches(
    tensors: LayerAddresses, step: TritonSmallBatchStep, router: Router
) -> tuple[Launch, ...]:
    """The kernels of `fused_moe` in a step of few tokens; see `moe_launches.layer_launches`."""
    inner = placed(step.scratch, tensors.scratch).inner
    ids = Ids(tensors.topk_ids, router.ids_64, tensors.expert_map, router.shared_expert)
    return (
        triton_gate_up_small_batch_launch(step.gate_up, tensors, ids, step.tokens, step.shape, inner),
        triton_down_small_batch_launch(step.down, tensors, ids, step.tokens, step.shape, inner, router.routed_scale),
    )


def triton_batched_launches(
    plan: TritonBatched, x: Rows, w13: Weights, w2: Weights, counts: Address, out: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `batched_experts`; see `moe_launches.batched_launches`."""
    at = placed(plan.scratch, scratch)
    tiles = Table(at.table, at.num_tiles, plan.tiles, plan.tile_rows)
    inner = Rows.k_major(at.inner, at.inner_scales, x.rows, w2.k)
    return [
        triton_tiles_of_counts_launch(plan.target, counts, w2.experts, x.rows // w2.experts, tiles),
        triton_gate_up_launch(plan.gate_up, x, w13, inner, tiles),
        triton_gemm_launch(plan.down, inner, w2, out, tiles),
    ]


def triton_contiguous_launches(
    plan: TritonGrouped, a: Rows, b: Weights, out: Address, m_indices: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `m_grouped_fp8_gemm_nt_contiguous`."""
    at = placed(plan.scratch, scratch)
    tiles = Table(at.table, at.num_tiles, plan.tiles, plan.tile_rows)
    return [
        triton_tiles_of_indices_launch(plan.target, m_indices, a.rows, b.experts, tiles),
        triton_gemm_launch(plan.kernel, a, b, out, tiles),
    ]


def triton_masked_launches(
    plan: TritonGrouped, a: Rows, b: Weights, out: Address, masked_m: Address, scratch: Address
) -> list[Launch]:
    """The kernels of `m_grouped_fp8_gemm_nt_masked`."""
    at = placed(plan.scratch, scratch)
    tiles = Table(at.table, at.num_tiles, plan.tiles, plan.tile_rows)
    return [
        triton_tiles_of_counts_launch(plan.target, masked_m, b.experts, a.rows // b.experts, tiles),
        triton_gemm_launch(plan.kernel, a, b, out, tiles),
    ]
