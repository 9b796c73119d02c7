"""Layers on Triton kernels in other tiles than the plan's."""

import functools

import pytest

from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.triton import Triton
from fp8moe_plugin.launches.triton.layer import layer_launches
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.plan.triton.plans import TritonStepPlan, triton_small_batch_step, triton_step


def force_step(patch: pytest.MonkeyPatch, tile_rows: int | None, activation: Activation = SILU) -> None:
    """`fused_moe` works in tiles of `tile_rows` rows, or with None as in a small batch."""

    def plan(self: Triton, spec: LayerSpec, tokens: int, multiprocessors: int) -> Plan:
        step: TritonStepPlan
        spec = spec._replace(activation=activation)
        if tile_rows is None:
            step = triton_small_batch_step(self.target, spec, tokens)
        else:
            step = triton_step(self.target, spec, tokens, tile_rows)
        return Plan(step, step.scratch.nbytes, functools.partial(layer_launches, step))

    patch.setattr(Triton, "plan_layer", plan)
