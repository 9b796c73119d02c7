"""The backend of the Triton kernels, for GPUs that the kernels in csrc do not run on."""

import functools

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.backend import PLANS, Plan, shared_plan
from fp8moe_plugin.launches.operands import Rows
from fp8moe_plugin.launches.triton.kernels import triton_quantize_launch, triton_silu_mul_quant_launch
from fp8moe_plugin.launches.triton.layer import batched_launches, dense_launches, grouped_launches, layer_launches
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import KernelKey, KernelSet
from fp8moe_plugin.plan.spec import Arrival, Grouping, LayerSpec, Output, layer_refusal
from fp8moe_plugin.plan.triton import kernel_sets, plans
from fp8moe_plugin.plan.triton.catalog import EXPERT_FORMATS


class Triton:
    """See `launches.backend.Backend`."""

    name = "triton"
    has_all_ops = False
    limits_multiprocessors = False
    reads_partial_k_blocks = False
    zeroes_ungrouped_rows = False
    tuning = UNTUNED

    def __init__(self, target: str) -> None:
        self.target = target

    def tuned(self, tuning: GpuTuning) -> "Triton":
        return self

    def refusal(self, spec: LayerSpec, arrival: Arrival) -> str | None:
        if arrival is Arrival.PUSHED:
            return f"rows that arrive {arrival}"
        return layer_refusal(spec, EXPERT_FORMATS)

    def layer_kernels(self, spec: LayerSpec, arrival: Arrival) -> KernelSet:
        return kernel_sets.layer_kernels(self.target, spec, arrival)

    def dense_kernels(self, ue8m0: bool, weights: WeightFormat = FP8_BLOCK, biased: bool = False) -> KernelSet:
        return kernel_sets.dense_kernels(self.target, ue8m0, weights)

    def batched_dense_kernels(self) -> KernelSet:
        return {}

    def indexer_kernels(self, heads: int, dim: int) -> KernelSet:
        return {}

    def op_kernels(self) -> list[KernelKey]:
        return kernel_sets.op_kernels(self.target)

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019  # a backend lives as long as the process
    def plan_layer(self, spec: LayerSpec, tokens: int, multiprocessors: int) -> Plan:
        step = plans.plan_layer(self.target, spec, tokens)
        return Plan(step, step.scratch.nbytes, functools.partial(layer_launches, step))

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019
    def plan_batched(self, spec: LayerSpec, max_m: int, expected_m: int, multiprocessors: int) -> Plan:
        plan = plans.plan_batched(self.target, spec, max_m, expected_m)
        return shared_plan(plan, batched_launches)

    @functools.lru_cache(maxsize=PLANS)  # noqa: B019
    def plan_grouped(
        self, grouping: Grouping, rows: int, groups: int, n: int, k: int, expected_m: int, multiprocessors: int
    ) -> Plan:
        plan = plans.plan_grouped(self.target, grouping, rows, groups, expected_m)
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
        f32 = output == Output.F32_DIRECT
        plan = plans.plan_dense(self.target, m, n, f32, multiprocessors, batch_invariant, weights)
        return Plan(plan, 0, functools.partial(dense_launches, plan))

    def quantize_launch(self, ue8m0: bool, x: Address, out: Rows) -> Launch:
        return triton_quantize_launch(self.target, ue8m0, x, out)

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
        return triton_silu_mul_quant_launch(self.target, ue8m0, activation, gate_up, counts, groups, max_m, out)
