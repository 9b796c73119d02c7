"""Experts whose weights have one scale for each row, against float64, and calls with tensors of another format."""

import pytest
import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import SILU
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.ops import batched_experts, choose_experts, fused_moe, routed_moe
from fp8moe_plugin.plan.tuning import GATHER_UP_TO
from tests import helpers as h

HIDDEN, EXPERTS, TOPK = 512, 6, 3
CLAMPED = h.MODIFIED[0]


@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize(
    ("tokens", "intermediate"),
    [(5, 256), (13, 256), (40, 128), (500, 128), (500, GATHER_UP_TO + 128)],
    ids=["small batch of 8", "small batch of 16", "few rows", "many gathered rows", "many rows"],
)
def test_a_layer(device, tokens, intermediate, activation):
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, intermediate, FP8_CHANNEL)
    routing = h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    out = fused_moe(x, *layer, *routing, weights=FP8_CHANNEL, activation=activation)
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True, activation=activation)) <= 1e-2


@pytest.mark.parametrize("tokens", [7, 65])
def test_a_shared_expert_and_a_choice_of_experts(device, tokens):
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, 128, FP8_CHANNEL)
    weights, ids = h.random_routing(gen, "out_of_range", tokens, TOPK, EXPERTS)
    out = fused_moe(x, *layer, weights, ids, weights=FP8_CHANNEL, shared_expert=True, routed_scale=2.5)
    columns = h.with_shared_expert(weights, ids, EXPERTS, 2.5)
    assert h.relative_l2(out, h.layer_reference(x, layer, *columns, quantized=True)) <= 1e-2
    logits = torch.randn(tokens, EXPERTS, generator=gen, device=device)
    chosen = fused_moe(x, *layer, *choose_experts(logits, TOPK), weights=FP8_CHANNEL)
    assert h.same_bits(routed_moe(x, *layer, logits, TOPK, weights=FP8_CHANNEL), chosen)


@pytest.mark.parametrize("expected_m", [1, 200])
def test_batched_experts(device, expected_m):
    gen, counts = h.seeded(0, device), [150, 0, 65, 9]
    (q, scales), layer = h.random_quantized(gen, 4, 160, HIDDEN), h.random_layer(gen, 4, HIDDEN, 128, FP8_CHANNEL)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    found = batched_experts(q, scales, *layer, masked_m, expected_m=expected_m, weights=FP8_CHANNEL)
    here = torch.arange(160, device=device) < masked_m[:, None]
    expected = h.swiglu(h.product((q, scales), layer[:2])) @ h.dequantize_weights(*layer[2:]).mT
    assert h.relative_l2(found[here], expected[here]) <= 0.07


def test_scales_of_the_other_format_are_refused(device):
    gen = h.seeded(0, device)
    x, routing = h.random_tokens(gen, 4, HIDDEN), h.random_routing(gen, "distinct", 4, TOPK, EXPERTS)
    blocks, rows = (h.random_layer(gen, EXPERTS, HIDDEN, 128, given) for given in (h.FP8_BLOCK, FP8_CHANNEL))
    with pytest.raises(InvalidInputError, match=r"w13's scales has shape \[6, 256, 1\], needs \[6, 2, 4\]"):
        fused_moe(x, *rows, *routing)
    with pytest.raises(InvalidInputError, match=r"w13's scales has shape \[6, 2, 4\], needs \[6, 256, 1\]"):
        fused_moe(x, *blocks, *routing, weights=FP8_CHANNEL)
    for other in (MXFP4, "fp8", None):
        with pytest.raises(InvalidInputError, match=r"weights is .*, needs a WeightFormat: that of block-FP8"):
            fused_moe(x, *rows, *routing, weights=other)
