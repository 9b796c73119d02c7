"""The plan names every kernel that a layer launches, at any number of tokens: what is loaded at start is enough."""

import sys

import pytest
import torch

from fp8moe_plugin import plan
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.ops.fused_moe import batched_experts
from fp8moe_plugin.ops.linear import fp8_linear
from tests import helpers as h

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 4, 2


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[plan.KernelKey]:
    """The keys of all launches, which are recorded in place of being made."""
    keys: set[plan.KernelKey] = set()
    fakes = {
        "launch": lambda key, *_: keys.add(key),
        "uses_sm90": lambda _: True,
        "multiprocessors": lambda _: 132,
        "tensor_map": lambda *_: None,
    }
    for name, module in list(sys.modules.items()):
        for attribute, fake in fakes.items():
            if name.startswith("fp8moe_plugin.ops.") and hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, fake)
    return keys


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_layer_launches_what_its_plan_names_and_nothing_else(launched, ue8m0):
    gen = h.seeded(0, torch.device("cpu"))
    layer = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    for tokens in (1, 7, 64, 128, 129, 1000):
        x = h.random_tokens(gen, tokens, HIDDEN)
        weights, ids = torch.rand(tokens, TOPK), torch.zeros(tokens, TOPK, dtype=torch.int32)
        fused_moe(x, *layer, weights, ids, ue8m0=ue8m0)
        fused_moe(x, *layer, weights, ids.long(), ue8m0=ue8m0)
    assert launched == set(plan.moe_kernels(ue8m0, batched=False))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_batched_experts_launch_what_their_plan_names_and_nothing_else(launched, ue8m0):
    gen = h.seeded(0, torch.device("cpu"))
    layer = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    tokens = h.random_quantized(gen, EXPERTS, 8, HIDDEN)
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    launched.clear()  # making the tokens quantized them
    for expected_m in (1, 64, 65, 1000):
        batched_experts(*tokens, *layer, counts, expected_m=expected_m, ue8m0=ue8m0)
    assert launched == set(plan.moe_kernels(ue8m0, batched=True))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_linear_layer_launches_what_its_plan_names_and_nothing_else(launched, ue8m0):
    gen = h.seeded(0, torch.device("cpu"))
    weight = h.random_weights(gen, 4096, 128)
    for tokens in (1, 64, 65, 1024, 4096):
        fp8_linear(h.random_tokens(gen, tokens, 128), *weight, ue8m0=ue8m0)
    assert launched == set(plan.linear_kernels(ue8m0))
