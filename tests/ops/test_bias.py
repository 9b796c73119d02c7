"""Experts with a bias in both GEMMs, against float64."""

import pytest
import torch

from fp8moe_plugin.formats.activation import SILU
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.ops import batched_experts, choose_experts, fused_moe, routed_moe
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.plan.tuning import GATHER_UP_TO
from tests import helpers as h
from tests.mxfp4 import random_experts

HIDDEN, EXPERTS, TOPK = 512, 6, 3
OAI = h.MODIFIED[1]


@pytest.mark.parametrize(("weights", "activation"), [(FP8_CHANNEL, SILU), (FP8_BLOCK, OAI)])
@pytest.mark.parametrize(
    ("tokens", "intermediate"),
    [(5, 256), (13, 256), (40, 128), (500, 128), (500, GATHER_UP_TO + 128)],
    ids=["small batch of 8", "small batch of 16", "few rows", "many gathered rows", "many rows"],
)
def test_a_layer(device, tokens, intermediate, weights, activation):
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, intermediate, weights)
    biases = h.random_biases(gen, EXPERTS, HIDDEN, intermediate)
    routing = h.random_routing(gen, "some_missing", tokens, TOPK, EXPERTS)
    out = fused_moe(x, *layer, *routing, **biases, weights=weights, activation=activation)
    call = {"activation": activation, "biases": biases}
    assert h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=True, **call)) <= 1e-2
    without = fused_moe(x, *layer, *routing, weights=weights, activation=activation)
    unquantized = h.layer_reference(x, layer, *routing, quantized=False, activation=activation)
    error = h.relative_l2(out, h.layer_reference(x, layer, *routing, quantized=False, **call))
    assert error <= 1.2 * h.relative_l2(without, unquantized)


@pytest.mark.parametrize("tokens", [7, 65])
def test_a_shared_expert_and_a_choice_of_experts(device, tokens):
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, 128)
    biases = h.random_biases(gen, EXPERTS, HIDDEN, 128)
    weights, ids = h.random_routing(gen, "out_of_range", tokens, TOPK, EXPERTS)
    out = fused_moe(x, *layer, weights, ids, **biases, shared_expert=True, routed_scale=2.5)
    columns = h.with_shared_expert(weights, ids, EXPERTS, 2.5)
    assert h.relative_l2(out, h.layer_reference(x, layer, *columns, quantized=True, biases=biases)) <= 1e-2
    logits = torch.randn(tokens, EXPERTS, generator=gen, device=device)
    chosen = fused_moe(x, *layer, *choose_experts(logits, TOPK), **biases)
    assert h.same_bits(routed_moe(x, *layer, logits, TOPK, **biases), chosen)


@pytest.mark.parametrize("expected_m", [1, 200])
def test_batched_experts(device, expected_m):
    gen, counts = h.seeded(0, device), [150, 0, 65, 9]
    (q, scales), layer = h.random_quantized(gen, 4, 160, HIDDEN), h.random_layer(gen, 4, HIDDEN, 128)
    biases = h.random_biases(gen, 4, HIDDEN, 128)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    found = batched_experts(q, scales, *layer, masked_m, expected_m=expected_m, **biases)
    here = torch.arange(160, device=device) < masked_m[:, None]
    gate_up = h.product((q, scales), layer[:2]) + biases["w13_bias"].double()[:, None]
    expected = h.swiglu(gate_up) @ h.dequantize_weights(*layer[2:]).mT + biases["w2_bias"].double()[:, None]
    assert h.relative_l2(found[here], expected[here]) <= 0.07


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(5, 256), (13, 2048), (40, 256), (300, 256)],
    ids=["small batch of 8", "small batch of 16", "few rows", "many rows"],
)
def test_packed_mxfp4(device, tokens, hidden):
    experts, gen = random_experts(h.seeded(0, torch.device("cpu")), 4, hidden, 256, SPAN), h.seeded(tokens, device)
    packed, fp8 = (h.Layer(*(tensor.to(device) for tensor in layer)) for layer in (experts.packed(), experts.in_fp8()))
    x, routing = h.random_tokens(gen, tokens, hidden), h.random_routing(gen, "some_missing", tokens, TOPK, 4)
    options = {"activation": OAI, "biases": h.random_biases(gen, 4, hidden, 256)}
    out = fused_moe(x, *packed, *routing, **options["biases"], weights=PACKED_MXFP4, activation=OAI)
    assert h.relative_l2(out, h.layer_reference(x, fp8, *routing, quantized=True, **options)) <= 1e-2
