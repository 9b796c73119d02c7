"""Layers on Triton kernels in other tiles than the plan's."""

import pytest

from fp8moe_plugin.ops import moe
from fp8moe_plugin.ops.backend import Device
from fp8moe_plugin.plan import MoeShape
from fp8moe_plugin.plan.triton_step import TritonStepPlan, triton_small_batch_step, triton_step


def force_step(patch: pytest.MonkeyPatch, height: int | None) -> None:
    """`fused_moe` works in tiles of `height` rows, or with None as in a small batch."""

    def plan(device: Device, shape: MoeShape, tokens: int, ue8m0: bool) -> TritonStepPlan:
        if height is None:
            return triton_small_batch_step(device.target, shape, tokens, ue8m0)
        return triton_step(device.target, shape, tokens, ue8m0, height)

    patch.setattr(moe, "plan_layer", plan)
