"""First kernels of layers behind kernels that let them start early: each returns the relative L2 error."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from fp8moe_plugin.ops import choose_experts, fused_moe, routed_moe, router_gemm
from fp8moe_plugin.ops.linear import fp8_linear
from tests import helpers as h
from tests.emulator.device import Device

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 256, 4, 2
CPU = torch.device("cpu")
Result = TypeVar("Result")


def execute_sorted(emulator: Device, seed: int, ops: Callable[[], Result]) -> Result:
    """What `ops` return, whose one layer takes a sorted step however few its tokens are."""
    with pytest.MonkeyPatch.context() as patch:
        steps = h.force_step(patch, width=0)
        result = emulator.execute(seed, ops)
    assert len(steps) == 1, "the layer has taken another plan"
    return result


def gate_behind_dense_layer(emulator: Device, seed: int, tokens: int = 9) -> float:
    gen = h.seeded(0, CPU)
    x, weight = h.random_tokens(gen, tokens, HIDDEN), h.random_weights(gen, 640, HIDDEN)
    gate = h.random_tokens(gen, 8, 640)

    def ops() -> tuple[torch.Tensor, torch.Tensor]:
        dense = fp8_linear(x, *weight)
        return dense, router_gemm(dense, gate)

    dense, logits = emulator.execute(seed, ops)
    return h.relative_l2(logits, router_gemm(dense, gate))


def layer_behind_dense_layer(emulator: Device, seed: int, tokens: int = 9) -> float:
    """A sorted step, whose quantize reads the tokens without waiting."""
    gen = h.seeded(0, CPU)
    x, weight = h.random_tokens(gen, tokens, HIDDEN), h.random_weights(gen, HIDDEN, HIDDEN)
    layer = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    routing = h.random_routing(gen, "distinct", tokens, TOPK, 3)

    def ops() -> tuple[torch.Tensor, torch.Tensor]:
        dense = fp8_linear(x, *weight)
        return dense, fused_moe(dense, *layer, *routing)

    dense, out = execute_sorted(emulator, seed, ops)
    return h.relative_l2(out, h.layer_reference(dense, layer, *routing, quantized=True))


def layer_behind_choice(emulator: Device, seed: int, tokens: int = 9) -> float:
    """A sorted step, whose route reads what `choose_experts` writes."""
    gen = h.seeded(0, CPU)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    logits = torch.randn(tokens, EXPERTS, generator=gen)

    def ops() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        choice = choose_experts(logits, TOPK)
        return fused_moe(x, *layer, *choice), choice

    out, choice = execute_sorted(emulator, seed, ops)
    return h.relative_l2(out, h.layer_reference(x, layer, *choice, quantized=True))


def layer_that_chooses(emulator: Device, seed: int, tokens: int = 9) -> float:
    """A sorted step of `routed_moe` behind a gate."""
    gen = h.seeded(0, CPU)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    gate = h.random_tokens(gen, EXPERTS, HIDDEN)

    def ops() -> tuple[torch.Tensor, torch.Tensor]:
        logits = router_gemm(x, gate)
        return routed_moe(x, *layer, logits, TOPK), logits

    out, logits = execute_sorted(emulator, seed, ops)
    return h.relative_l2(out, h.layer_reference(x, layer, *choose_experts(logits, TOPK), quantized=True))
