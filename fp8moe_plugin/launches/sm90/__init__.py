"""The CUDA kernels in csrc, which run on Hopper GPUs."""

import functools

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.backend import PLANS, Plan, shared_plan
from fp8moe_plugin.launches.operands import Rows
from fp8moe_plugin.launches.sm90.gemm import dense_launches
from fp8moe_plugin.launches.sm90.grouped import grouped_launches
from fp8moe_plugin.launches.sm90.layer import batched_launches, layer_launches
from fp8moe_plugin.launches.sm90.quantize import quantize_rows_launch, silu_mul_quant_launch
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import SM90, KernelKey, KernelSet
from fp8moe_plugin.plan.sm90 import dense, grouped, kernel_sets, layer
from fp8moe_plugin.plan.sm90.indexer import indexer_refusal
from fp8moe_plugin.plan.spec import Arrival, Grouping, LayerSpec, Output, layer_refusal


@functools.lru_cache(maxsize=PLANS)
def _batched_plan(plan: grouped.BatchedPlan) -> Plan:
    """Returns one plan for all calls with these choices, as `shared_plan` does."""
    launches = functools.partial(batched_launches, plan)
    return Plan(plan, plan.scratch.nbytes, launches, any_scale_strides=plan.tile.streams_weights)


class Sm90:
    """See `launches.backend.Backend`."""

    name = "sm90"
    target = SM90
    has_all_ops = True
    limits_multiprocessors = True
    reads_partial_k_blocks = True
    zeroes_ungrouped_rows = True

    def __init__(self, tuning: GpuTuning = UNTUNED) -> None:
        self.tuning = tuning

    def tuned(self, tuning: GpuTuning) -> "Sm90":
        return self if tuning == self.tuning else Sm90(tuning)

    def refusal(self, spec: LayerSpec, arrival: Arrival) -> str | None:
        return layer_refusal(spec)

    def layer_kernels(self, spec: LayerSpec, arrival: Arrival) -> KernelSet:
        return kernel_sets.layer_kernels(spec, arrival)

    def dense_kernels(self, ue8m0: bool, weights: WeightFormat = FP8_BLOCK, biased: bool = False) -> KernelSet:
        return kernel_sets.dense_kernels(ue8m0, weights, biased)

    def batched_dense_kernels(self) -> KernelSet:
        return kernel_sets.batched_dense_kernels()

    def indexer_kernels(self, heads: int, dim: int) -> KernelSet:
        return {} if indexer_refusal(heads, dim) else kernel_sets.indexer_kernels(heads)

    def op_kernels(self) -> list[KernelKey]:
        return kernel_sets.op_kernels()

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019  # a backend lives as long as the process
    def plan_layer(self, spec: LayerSpec, tokens: int, multiprocessors: int) -> Plan:
        step = layer.plan_layer(spec, tokens, multiprocessors, self.tuning)
        starts_before_ids = isinstance(step, layer.SmallBatchStep)
        return Plan(step, step.scratch.nbytes, functools.partial(layer_launches, step), starts_before_ids)

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019
    def plan_batched(self, spec: LayerSpec, max_m: int, expected_m: int, multiprocessors: int) -> Plan:
        return _batched_plan(grouped.plan_batched(spec, max_m, expected_m, multiprocessors, self.tuning))

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019
    def plan_grouped(
        self, grouping: Grouping, rows: int, groups: int, n: int, k: int, expected_m: int, multiprocessors: int
    ) -> Plan:
        plan = grouped.plan_grouped(grouping, rows, groups, n, k, expected_m, multiprocessors, self.tuning)
        return shared_plan(plan, grouped_launches, grouping)

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019
    def plan_dense(
        self,
        m: int,
        n: int,
        k: int,
        output: Output,
        multiprocessors: int,
        batch_invariant: bool,
        weights: WeightFormat = FP8_BLOCK,
        biased: bool = False,
    ) -> Plan:
        plan = dense.plan_dense(m, n, k, output, multiprocessors, batch_invariant, weights, biased)
        return Plan(plan, 0, functools.partial(dense_launches, plan), adds_bias=not plan.is_grouped)

    def quantize_launch(self, ue8m0: bool, x: Address, out: Rows) -> Launch:
        return quantize_rows_launch(ue8m0, x, out)

    def silu_mul_quant_launch(
        self,
        ue8m0: bool,
        activation: Activation,
        gate_up: Address,
        counts: Address,
        groups: int,
        max_m: int,
        out: Rows,
        multiprocessors: int,
    ) -> Launch:
        return silu_mul_quant_launch(ue8m0, activation, gate_up, counts, groups, max_m, out, multiprocessors)
