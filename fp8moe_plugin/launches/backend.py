"""The interface of a backend: the layers that it supports, its kernels, and the plan and launches of a call."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Rows
from fp8moe_plugin.plan.gpu_tuning import GpuTuning
from fp8moe_plugin.plan.keys import KernelKey, KernelSet
from fp8moe_plugin.plan.spec import Arrival, Grouping, LayerSpec, Output

PLANS = 4096  # that each cache keeps


# Compared by identity, which is fast: backends cache their plans.
@dataclass(frozen=True, eq=False)
class Plan:
    """The kernels of a call, and the scratch memory that they need."""

    choices: object  # the backend's own plan, a dataclass of plan/sm90 or plan/triton
    scratch: int  # bytes of scratch memory
    launches: Callable[..., Sequence[Launch]]  # takes addresses; each `plan_` method of `Backend` lists them
    starts_before_ids: bool = False  # a layer's first kernel may start (PDL) before the ids are written
    any_scale_strides: bool = False  # of batched experts; False: only scales of `k_major`
    adds_bias: bool = False  # a dense GEMM with a bias adds it


@functools.lru_cache(maxsize=PLANS)
def shared_plan(choices: Any, launches: Callable[..., Sequence[Launch]], *leading: object) -> Plan:
    """Returns one plan for all calls with these choices, so that their launches are prepared once.

    Args:
        choices: hashable, with a `scratch`.
        launches: takes the choices, `leading`, and then what `Plan.launches` takes.
    """
    return Plan(choices, choices.scratch.nbytes, functools.partial(launches, choices, *leading))


class Backend(Protocol):
    """The kernels of one target.

    Attributes:
        name: the name in logs and metrics.
        target: the target that its kernels are compiled for.
        has_all_ops: it also has the kernels that layers can do without: routers, indexers, gradients, `ENDS` groups,
            and copies of scales.
        limits_multiprocessors: its GEMMs use at most the given number of multiprocessors.
        reads_partial_k_blocks: operands of GEMMs may end within a K block.
        zeroes_ungrouped_rows: a grouped GEMM writes zeros to rows of no group.
        tuning: the thresholds of its plans.
    """

    name: str
    target: str
    has_all_ops: bool
    limits_multiprocessors: bool
    reads_partial_k_blocks: bool
    zeroes_ungrouped_rows: bool
    tuning: GpuTuning

    def tuned(self, tuning: GpuTuning) -> "Backend":
        """Returns the backend with this tuning. One whose plans have other thresholds returns itself."""
        ...

    def refusal(self, spec: LayerSpec, arrival: Arrival) -> str | None:
        """Returns why the kernels cannot compute this layer where rows arrive so, or None if they can."""
        ...

    def layer_kernels(self, spec: LayerSpec, arrival: Arrival) -> KernelSet:
        """Returns every kernel that a mixture-of-experts layer may launch at any number of tokens.

        Only for a layer without a `refusal`.
        """
        ...

    def dense_kernels(self, ue8m0: bool, weights: WeightFormat = FP8_BLOCK, biased: bool = False) -> KernelSet:
        """Returns every kernel that dense layers with weights in this format may launch; `biased`: some have a bias."""
        ...

    def batched_dense_kernels(self) -> KernelSet:
        """Returns the kernels of batched dense GEMMs; an empty set if this backend does not load them for a layer."""
        ...

    def indexer_kernels(self, heads: int, dim: int) -> KernelSet:
        """Returns the kernels of an indexer; an empty set if this backend does not support it."""
        ...

    def op_kernels(self) -> list[KernelKey]:
        """Returns the kernels that only direct calls of the ops launch."""
        ...

    def plan_layer(self, spec: LayerSpec, tokens: int, multiprocessors: int) -> Plan:
        """Returns the plan of `fused_moe`; launches take `LayerAddresses` and whether ids are int64."""
        ...

    def plan_batched(self, spec: LayerSpec, max_m: int, expected_m: int, multiprocessors: int) -> Plan:
        """Returns the plan of `batched_experts`; launches take x, w13, w2, and addresses of counts, out and scratch.

        Args:
            expected_m: rows per expert on average.
        """
        ...

    def plan_grouped(
        self, grouping: Grouping, rows: int, groups: int, n: int, k: int, expected_m: int, multiprocessors: int
    ) -> Plan:
        """Returns the plan of a grouped GEMM; launches take a, b, and addresses of out, the grouping and scratch."""
        ...

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
        """Returns the plan of a dense GEMM; launches take a, b, and addresses of out and of an addend (0 for none).

        Launches also take `after_quantize`: the preceding kernel quantizes a, and the GEMM may start before it ends.
        """
        ...

    def quantize_launch(self, ue8m0: bool, x: Address, out: Rows) -> Launch:
        """Returns the launch that quantizes bfloat16 `[rows, k]` at `x` to rows with K-major or row-major scales."""
        ...

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
        """Returns the launch that applies the activation to bfloat16 `[groups, max_m, 2I]` and quantizes the result.

        It processes the first `counts[g]` rows of each group.
        """
        ...
