"""A GEMM of the layer alone, as benchmarks/layer/mxfp4_gemm.py repeats it, on the emulator."""

import pytest
import torch

from benchmarks.layer.mxfp4_gemm import GEMMS, OurGemm, make_case
from fp8moe_plugin.bench.packed import in_block_fp8, packed, random_mxfp4
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops.moe import fused_moe
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h
from tests.emulator.device import Device


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(("weights", "rows"), [(PACKED_MXFP4, 6), (PACKED_MXFP4, 70), (FP8_BLOCK, 6), (FP8_BLOCK, 70)])
def test_a_repeated_gemm_leaves_the_result_of_the_layer(
    emulator: Device, gemm: str, weights: WeightFormat, rows: int
) -> None:
    experts, activation = Experts(1, 3, 1, 256, 128), Activation(limit=10.0)
    stored = random_mxfp4(experts, torch.device("cpu"))
    in_fp8 = in_block_fp8(stored)
    layer = packed(stored) if weights is PACKED_MXFP4 else in_fp8
    case = make_case(experts, rows, in_fp8, activation)
    spec = LayerSpec(MoeShape.of(experts, 3), weights=weights, ue8m0=True, activation=activation)

    def ops() -> torch.Tensor:
        repeated = OurGemm(gemm, spec, layer, case)
        for _ in range(3):
            repeated()
        return repeated.result()

    form = {"weights": weights, "activation": activation, "ue8m0": True}
    ones = torch.ones(case.ids.shape)
    wanted = emulator.execute(1, lambda: fused_moe(case.x, *layer.w13, *layer.w2, ones, case.ids, **form))
    assert h.same_bits(emulator.execute(2, ops), wanted)
    assert h.relative_l2(wanted[: len(case.expected)], case.expected) < 0.1
