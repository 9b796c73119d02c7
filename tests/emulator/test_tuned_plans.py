"""The calls that `fp8moe-warmup tune` times: a layer by each plan that thresholds choose between."""

import pytest
import torch

from fp8moe_plugin.bench.layer import random_step
from fp8moe_plugin.bench.packed import in_block_fp8, random_mxfp4
from fp8moe_plugin.bench.tune import drawn_layer, layer_calls
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h
from tests.emulator.device import Device
from tests.emulator.layers import MOST_ERROR

SPEC, TOKENS = LayerSpec(MoeShape(2, 256, 128, 5, 5)), 6
NO_SMALL_BATCH = {"small_batch_bytes": 0, "packed_small_batch_bytes": 0}
MANY_ROWS = {"few_rows_per_expert": 0, "packed_few_rows_per_expert": 0}
TUNINGS = UNTUNED, GpuTuning(**NO_SMALL_BATCH), GpuTuning(**NO_SMALL_BATCH, **MANY_ROWS)


@pytest.mark.parametrize("stored", [FP8_BLOCK, PACKED_MXFP4])
def test_each_plan_computes_the_layer(emulator: Device, stored: WeightFormat) -> None:
    cpu, spec = torch.device("cpu"), SPEC._replace(weights=stored)
    experts, weights = drawn_layer(spec, cpu)
    in_fp8 = in_block_fp8(random_mxfp4(experts, cpu)) if stored is PACKED_MXFP4 else weights
    x, (routing, *_) = random_step(experts, TOKENS, cpu)
    expected = h.layer_reference(x, h.Layer(*in_fp8.w13, *in_fp8.w2), *routing, quantized=True)
    emulator.multiprocessors = 24
    plans = [BACKENDS[SM90].tuned(tuning).plan_layer(spec, TOKENS, 24) for tuning in TUNINGS]
    assert len({plan.choices for plan in plans}) == 3
    outs = [torch.full_like(x, float("nan")) for _ in plans]

    def run() -> None:
        for plan, out in zip(plans, outs, strict=True):
            for call in layer_calls(emulator, plan, weights, x, out, [routing]):
                call()

    emulator.execute(1, run)
    assert max(h.relative_l2(out, expected) for out in outs) < MOST_ERROR
