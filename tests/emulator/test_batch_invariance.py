"""Batch invariance on the emulator: a token's result is the same alone and among others."""

import pytest
import torch

from benchmarks.layer.batch_invariance import invariance
from fp8moe_plugin import plan
from fp8moe_plugin.ops import fused_moe, gemm_launch
from fp8moe_plugin.ops.linear import fp8_linear
from tests import helpers as h
from tests.emulator.device import Device

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 3, 2, 384, 128
TOGETHER = {9: plan.dense_gemm_key(128), 300: plan.grouped_gemm_key(plan.Output.BF16)}  # other kernels than alone


@pytest.mark.parametrize("tokens", [30, 140])  # tiles of 32 and 128 rows; alone of 8
def test_a_layer(emulator: Device, tokens: int) -> None:
    gen = h.seeded(tokens, torch.device("cpu"))
    layer = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    x = h.random_tokens(gen, tokens, HIDDEN)
    weights, ids = h.random_routing(gen, "distinct", tokens, TOPK, EXPERTS)
    with invariance(True):
        together = emulator.execute(1, lambda: fused_moe(x, *layer, weights, ids))
        for row in (0, tokens - 1):
            one = slice(row, row + 1)
            alone = emulator.execute(2, lambda one=one: fused_moe(x[one].clone(), *layer, weights[one], ids[one]))
            assert h.same_bits(together[one], alone)
    assert h.relative_l2(together, h.layer_reference(x, layer, weights, ids, quantized=True)) <= 1e-2


@pytest.mark.parametrize("tokens", [9, 300])
def test_a_dense_layer(emulator: Device, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    gen = h.seeded(tokens, torch.device("cpu"))
    monkeypatch.setattr(plan, "LONG_K", 9 * h.GROUP)
    x, (weight, scales) = h.random_tokens(gen, tokens, 9 * h.GROUP), h.random_weights(gen, 200, 9 * h.GROUP)
    blocks, columns = x.unflatten(1, (9, -1)), h.bits(weight).unflatten(1, (9, -1))
    blocks[:, 2] *= 2**16  # what cancels shows the order
    blocks[:, 3], columns[:, 3], scales[:, 3] = -blocks[:, 2], columns[:, 2], scales[:, 2]
    with invariance(True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemm_launch, "dense_key", lambda *_: TOGETHER[tokens])
            patch.setattr(gemm_launch, "dense_tile", lambda *_: (128, 144))
            together = emulator.execute(1, lambda: fp8_linear(x, weight, scales))
        for row in (0, tokens - 1):
            one = x[row : row + 1].clone()
            alone = emulator.execute(2, lambda one=one: fp8_linear(one, weight, scales))
            assert h.same_bits(together[row : row + 1], alone)
    with invariance(False):
        divided = emulator.execute(3, lambda: fp8_linear(one, weight, scales))
    assert not h.same_bits(alone, divided)
