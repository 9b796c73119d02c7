"""Limits, alpha and beta in every step of a layer, against float64."""

import pytest
import torch

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.ops import batched_experts, fused_moe
from fp8moe_plugin.plan.tuning import GATHER_UP_TO
from tests import helpers as h

modified = pytest.mark.parametrize("activation", h.MODIFIED, ids=lambda activation: activation.kind)
HIDDEN, EXPERTS, TOPK = 512, 6, 3


@modified
@pytest.mark.parametrize(
    ("tokens", "intermediate"),
    [(5, 128), (13, 128), (40, 128), (500, 128), (500, GATHER_UP_TO + 128)],
    ids=["small batch of 8", "small batch of 16", "few rows", "many gathered rows", "many rows"],
)
def test_a_layer(device: torch.device, activation: Activation, tokens: int, intermediate: int) -> None:
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, intermediate)
    routing = h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    out = fused_moe(x, *layer, *routing, activation=activation)
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True, activation=activation)) <= 1e-2
    without_limit = activation._replace(limit=1e9)
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=False, activation=without_limit)) > 0.1


@modified
def test_batched_experts(device: torch.device, activation: Activation) -> None:
    gen, counts = h.seeded(0, device), [150, 0, 65, 9]
    (q, scales), layer = h.random_quantized(gen, 4, 160, HIDDEN), h.random_layer(gen, 4, HIDDEN, 128)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    found = batched_experts(q, scales, *layer, masked_m, expected_m=60, activation=activation)
    here, sums = torch.arange(160, device=device) < masked_m[:, None], h.product((q, scales), layer[:2])
    for limited in (activation, activation._replace(limit=1e9)):
        expected = h.swiglu(sums, limited) @ h.dequantize_weights(*layer[2:]).mT
        assert (h.relative_l2(found[here], expected[here]) <= 0.07) == (limited == activation)
