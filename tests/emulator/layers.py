"""Layers of experts one behind the other, as a model runs them."""

import pytest
import torch

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops import choose_experts, fused_moe, routed_moe, router_gemm, workspace
from fp8moe_plugin.ops.linear import fp8_linear
from fp8moe_plugin.ops.quantize import per_token_group_quant_fp8
from fp8moe_plugin.plan.sm90 import layer as sm90_layer
from fp8moe_plugin.plan.sm90.tiles import MANY_ROWS
from tests import helpers as h
from tests.emulator.device import Device
from tests.emulator.inputs import assert_close
from tests.mxfp4 import random_experts
from tests.steps import empty_tokens, quantize_tokens

KINDS = ("some_missing", "one_expert", "distinct")  # of the layers' routings, in turn
MOST_ERROR = 1e-2  # relative L2


def run_layers(
    emulator: Device,
    seed: int,
    tokens: int,
    hidden: int,
    intermediate: int,
    layers: int = 3,
    inputs: int | None = None,
    small_batch: int = 0,
) -> list[float]:
    """Returns the relative L2 error of each of these layers; each reads what the one before has written.

    All have the same scratch, as torch's allocator gives it: what the layer before has left there is not NaN.

    Args:
        inputs: seed of tokens, weights and ids; None: `seed`.
        small_batch: how wide the kernels of a small batch multiply the tokens; 0: others are run.
    """
    gen, experts = h.seeded(seed if inputs is None else inputs, torch.device("cpu")), 3
    outs: list[torch.Tensor] = []
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, intermediate)
    routings = [h.random_routing(gen, KINDS[i % len(KINDS)], tokens, 2, experts) for i in range(layers)]
    scratch = torch.zeros(2**24, dtype=torch.uint8)

    def shared(nbytes: int, like: torch.Tensor) -> torch.Tensor:
        return scratch[:nbytes]

    def ops() -> None:
        for weights, ids in routings:
            outs.append(fused_moe(outs[-1] if outs else x, *layer, weights, ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "scratch", shared)
        h.force_step(patch, width=small_batch)
        emulator.execute(seed, ops)
    calls = zip([x, *outs[:-1]], outs, routings, strict=True)
    return [h.relative_l2(y, h.layer_reference(x, layer, *routing, quantized=True)) for x, y, routing in calls]


def run_quantized_tokens(
    emulator: Device, seed: int, tokens: int, hidden: int, intermediate: int, copies: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of a layer for tokens that the kernel before it quantizes, and for the same in bfloat16.

    Args:
        copies: GEMM 1 reads a copy of each token for each of its experts.
    """
    gen, experts = h.seeded(0, torch.device("cpu")), 3
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, intermediate)
    routing = h.random_routing(gen, "some_missing", tokens, 2, experts)

    def quantized() -> torch.Tensor:
        q, scales = empty_tokens(tokens, hidden, x.device)
        quantize_tokens(x, (q, scales))
        return fused_moe(q, *layer, *routing, hidden_scale=scales)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90_layer, "GATHER_UP_TO", 0 if copies else intermediate)
        steps = h.force_step(patch, tile=MANY_ROWS if copies else None)
        both = emulator.execute(seed, quantized), emulator.execute(seed, lambda: fused_moe(x, *layer, *routing))
    assert [step.gathers for step in steps] == [not copies] * 2
    return both


def packed_moe(
    x: torch.Tensor, layer: h.Layer, weights: torch.Tensor, ids: torch.Tensor, **biases: torch.Tensor
) -> torch.Tensor:
    return fused_moe(x, *layer, weights, ids, **biases, weights=PACKED_MXFP4)


def run_packed_layer(
    emulator: Device,
    seed: int,
    tokens: int = 5,
    span: int = 30,
    hidden: int = 384,
    intermediate: int = 256,
    biased: bool = False,
) -> float:
    """Returns the largest relative L2 error of a channel of a layer in packed MXFP4.

    Args:
        span: of the exponents in a block, in binades: some channels are much smaller than others.
    """
    gen = h.seeded(0, torch.device("cpu"))
    x, layer = h.random_tokens(gen, tokens, hidden), random_experts(gen, 2, hidden, intermediate, span).packed()
    routing = h.random_routing(gen, "distinct", tokens, 2, 2)
    biases = h.random_biases(gen, 2, hidden, intermediate) if biased else {}
    out = emulator.execute(seed, lambda: packed_moe(x, layer, *routing, **biases))
    pairs = zip(out.T, packed_moe(x, layer, *routing, **biases).T, strict=True)
    return max(h.relative_l2(actual, expected) for actual, expected in pairs)


def run_dense_layer(
    emulator: Device,
    seed: int,
    gen: torch.Generator,
    m: int,
    n: int,
    k: int,
    weights: WeightFormat = FP8_BLOCK,
    biased: bool = False,
) -> None:
    """A dense layer of `m` random tokens, held against the product of the quantized ones."""
    x, weight = h.random_tokens(gen, m, k), h.random_weights(gen, n, k, weights=weights)
    bias = h.random_tokens(gen, n) if biased else None
    out = emulator.execute(seed, lambda: fp8_linear(x, *weight, bias))
    expected = h.product(per_token_group_quant_fp8(x), weight)
    assert_close(out, expected if bias is None else expected + bias.double(), "the layer")


def run_routed_layers(
    emulator: Device, seed: int, tokens: int, hidden: int, intermediate: int, gates: bool = False, shared: bool = False
) -> list[float]:
    """Returns the relative L2 error of each of three small batches that choose their experts, each from the one before.

    Args:
        gates: their logits come from `router_gemm`; else they are there, and a layer follows the one before directly.
        shared: the last expert is a shared one, with a gate.
    """
    gen, experts, topk = h.seeded(seed, torch.device("cpu")), 4, 3
    x, layer = h.random_tokens(gen, tokens, hidden), h.random_layer(gen, experts, hidden, intermediate)
    routed, gate = experts - shared, (h.random_tokens(gen, 1, hidden) / hidden**0.5).bfloat16() if shared else None
    logits, outs = [torch.randn(tokens, routed, generator=gen) for _ in range(3)], []
    weights = [h.random_tokens(gen, routed, hidden) for _ in logits]
    scratch = torch.zeros(2**24, dtype=torch.uint8)

    def ops() -> None:
        for i, weight in enumerate(weights):
            given = outs[-1] if outs else x
            if gates:
                logits[i] = router_gemm(given, weight)
            outs.append(routed_moe(given, *layer, logits[i], topk, shared_gate=gate))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "scratch", lambda nbytes, like: scratch[:nbytes])
        steps = h.force_step(patch, width=8 if tokens <= 8 else 16)
        emulator.execute(seed, ops)
        assert len(steps) == len(outs), "the layers have taken other plans"
    calls = list(zip([x, *outs[:-1]], weights, logits, outs, strict=True))
    for x, weight, given, _ in calls:
        assert not gates or h.relative_l2(given, router_gemm(x, weight)) <= MOST_ERROR, "the logits are wrong"
    chosen = [choose_experts(given, topk, hidden_states=x, shared_gate=gate) for x, _, given, _ in calls]
    expected = [fused_moe(call[0], *layer, *c, shared_expert=shared) for call, c in zip(calls, chosen, strict=True)]
    return [h.relative_l2(out, wanted) for out, wanted in zip(outs, expected, strict=True)]
