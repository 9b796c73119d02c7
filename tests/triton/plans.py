"""Layers on Triton kernels in other tiles than the plan's."""

import pytest

from fp8moe_plugin.ops import moe
from fp8moe_plugin.ops.backend import Device
from fp8moe_plugin.plan import MoeShape
from fp8moe_plugin.plan.triton_step import TritonStep, triton_step


def force_step(patch: pytest.MonkeyPatch, height: int, narrow: bool) -> None:
    """`fused_moe` works in tiles of `height` rows; `narrow`: see `triton_step`."""

    def plan(device: Device, shape: MoeShape, tokens: int, ue8m0: bool) -> TritonStep:
        return triton_step(device.target, shape, tokens, ue8m0, height, narrow)

    patch.setattr(moe, "plan_layer", plan)
