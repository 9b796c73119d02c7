"""The calls that `fp8moe-warmup tune` times: a layer by each plan that thresholds choose between."""

import torch

from fp8moe_plugin.bench.layer import random_step
from fp8moe_plugin.bench.tune import drawn_layer, layer_calls
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h
from tests.emulator.device import Device
from tests.emulator.layers import MOST_ERROR

SPEC, TOKENS = LayerSpec(MoeShape(2, 256, 128, 5, 5)), 6
TUNINGS = UNTUNED, GpuTuning(small_batch_bytes=0), GpuTuning(small_batch_bytes=0, few_rows_per_expert=0)


def test_each_plan_computes_the_layer(emulator: Device) -> None:
    experts, weights = drawn_layer(SPEC, torch.device("cpu"))
    x, (routing, *_) = random_step(experts, TOKENS, torch.device("cpu"))
    expected = h.layer_reference(x, h.Layer(*weights.w13, *weights.w2), *routing, quantized=True)
    emulator.multiprocessors = 24
    plans = [BACKENDS[SM90].tuned(tuning).plan_layer(SPEC, TOKENS, 24) for tuning in TUNINGS]
    assert len({plan.choices for plan in plans}) == 3
    outs = [torch.full_like(x, float("nan")) for _ in plans]

    def run() -> None:
        for plan, out in zip(plans, outs, strict=True):
            for call in layer_calls(emulator, plan, weights, x, out, [routing]):
                call()

    emulator.execute(1, run)
    assert max(h.relative_l2(out, expected) for out in outs) < MOST_ERROR
