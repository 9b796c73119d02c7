"""Batch invariance on the emulator: a token's result is the same alone and among others."""

from collections.abc import Iterator

import pytest
import torch

from fp8moe_plugin.launches.sm90 import Sm90
from fp8moe_plugin.ops import fp8_linear, fused_moe
from fp8moe_plugin.plan.sm90 import dense
from fp8moe_plugin.plan.sm90.dense import DensePlan
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.testing import invariance
from tests import helpers as h
from tests.emulator.device import Device

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 3, 2, 384, 128


def together(m: int, n: int, multiprocessors: int) -> DensePlan:
    """Other kernels than alone."""
    if m == 9:
        return dense.tiled(m, n, 128, 144, multiprocessors)
    return dense.grouped(m, n, Output.BF16, multiprocessors)


@pytest.fixture
def long_k(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """K that dense layers split, much shorter than for models."""
    k = 9 * h.GROUP
    monkeypatch.setattr(dense, "LONG_K", k)
    Sm90.plan_dense.cache_clear()
    yield k
    Sm90.plan_dense.cache_clear()


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
def test_a_dense_layer(emulator: Device, long_k: int, tokens: int) -> None:
    gen = h.seeded(tokens, torch.device("cpu"))
    x, (weight, scales) = h.random_tokens(gen, tokens, long_k), h.random_weights(gen, 200, long_k)
    blocks, columns = x.unflatten(1, (9, -1)), h.bits(weight).unflatten(1, (9, -1))
    blocks[:, 2] *= 2**16  # what cancels shows the order
    blocks[:, 3], columns[:, 3], scales[:, 3] = -blocks[:, 2], columns[:, 2], scales[:, 2]
    with invariance(True):
        with pytest.MonkeyPatch.context() as patch:
            h.force_dense(patch, together)
            all_tokens = emulator.execute(1, lambda: fp8_linear(x, weight, scales))
        for row in (0, tokens - 1):
            one = x[row : row + 1].clone()
            alone = emulator.execute(2, lambda one=one: fp8_linear(one, weight, scales))
            assert h.same_bits(all_tokens[row : row + 1], alone)
    with invariance(False), pytest.MonkeyPatch.context() as patch:
        h.force_dense(patch, lambda m, n, _: dense.few_rows(m, n))  # which needs more multiprocessors than these
        divided = emulator.execute(3, lambda: fp8_linear(one, weight, scales))
    assert not h.same_bits(alone, divided)
