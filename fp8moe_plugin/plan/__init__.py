"""Which kernels exist, and which of them a call launches. Pure Python, used by the runtime and the warm-up.

`catalog` names every kernel and `parameters` its arguments; `step`, `grouped` and `dense` make the plan of a call;
`tiles` cuts rows into tiles, `scratch` lays out scratch memory, `tuning` holds the measured constants, `constants` what
kernels are compiled with, and `closure` lists the kernels that a layer or a model may launch.
"""

from fp8moe_plugin.plan.catalog import HOPPER, KernelKey, combine_key
from fp8moe_plugin.plan.closure import all_kernels, linear_kernels, model_kernels, moe_kernels
from fp8moe_plugin.plan.constants import Layout, Output
from fp8moe_plugin.plan.dense import DensePlan, plan_dense
from fp8moe_plugin.plan.grouped import BatchedPlan, GroupedPlan, plan_batched, plan_contiguous, plan_masked
from fp8moe_plugin.plan.shape import MoeShape
from fp8moe_plugin.plan.step import SmallBatchStep, SortedStep, StepPlan, plan_step

__all__ = [
    "HOPPER",
    "BatchedPlan",
    "DensePlan",
    "GroupedPlan",
    "KernelKey",
    "Layout",
    "MoeShape",
    "Output",
    "SmallBatchStep",
    "SortedStep",
    "StepPlan",
    "all_kernels",
    "combine_key",
    "linear_kernels",
    "model_kernels",
    "moe_kernels",
    "plan_batched",
    "plan_contiguous",
    "plan_dense",
    "plan_masked",
    "plan_step",
]
