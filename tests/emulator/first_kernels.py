"""First kernels of ops behind kernels that let them start early: each returns the relative L2 error."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from fp8moe_plugin.ops import (
    choose_experts,
    fused_moe,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_psum,
    reference,
    routed_moe,
    router_gemm,
    workspace,
)
from fp8moe_plugin.ops.linear import fp8_linear
from tests import helpers as h
from tests.emulator.device import Device

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 256, 4, 2
CPU = torch.device("cpu")
Result = TypeVar("Result")


def execute_sorted(emulator: Device, seed: int, ops: Callable[[], Result]) -> Result:
    """Returns what `ops` return, whose one layer takes a sorted step however few its tokens are."""
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


def choice_behind_dense_layer(emulator: Device, seed: int, tokens: int = 9) -> float:
    """The gate of a shared expert reads the tokens."""
    gen = h.seeded(0, CPU)
    x, weight, logits = h.random_tokens(gen, tokens, HIDDEN), h.random_weights(gen, 640, HIDDEN), torch.zeros(tokens, 8)
    gate = (h.random_tokens(gen, 1, 640) / 640**0.5).bfloat16()

    def ops() -> tuple[torch.Tensor, torch.Tensor]:
        dense = fp8_linear(x, *weight)
        return dense, choose_experts(logits, TOPK, hidden_states=dense, shared_gate=gate)[0]

    dense, weights = emulator.execute(seed, ops)
    return h.relative_l2(weights, choose_experts(logits, TOPK, hidden_states=dense, shared_gate=gate)[0])


def layer_behind_dense_layer(emulator: Device, seed: int, tokens: int = 9) -> float:
    """Returns a sorted step, whose quantize reads the tokens without waiting."""
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
    """Returns a sorted step, whose route reads what `choose_experts` writes."""
    gen = h.seeded(0, CPU)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    logits = torch.randn(tokens, EXPERTS, generator=gen)

    def ops() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        choice = choose_experts(logits, TOPK)
        return fused_moe(x, *layer, *choice), choice

    out, choice = execute_sorted(emulator, seed, ops)
    return h.relative_l2(out, h.layer_reference(x, layer, *choice, quantized=True))


def layer_that_chooses(emulator: Device, seed: int, tokens: int = 9) -> float:
    """Returns a sorted step of `routed_moe` behind a gate."""
    gen = h.seeded(0, CPU)
    x, layer = h.random_tokens(gen, tokens, HIDDEN), h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE)
    gate = h.random_tokens(gen, EXPERTS, HIDDEN)

    def ops() -> tuple[torch.Tensor, torch.Tensor]:
        logits = router_gemm(x, gate)
        return routed_moe(x, *layer, logits, TOPK), logits

    out, logits = execute_sorted(emulator, seed, ops)
    return h.relative_l2(out, h.layer_reference(x, layer, *choose_experts(logits, TOPK), quantized=True))


def contiguous_gemm_behind_choice(emulator: Device, seed: int, tokens: int = 9) -> float:
    """The group of each row comes from the choice."""
    gen = h.seeded(0, CPU)
    a, b = reference.quantize(h.random_tokens(gen, tokens, HIDDEN)), h.random_weights(gen, EXPERTS, 384, HIDDEN)
    logits = torch.randn(tokens, EXPERTS, generator=gen)

    def op() -> tuple[torch.Tensor, torch.Tensor]:
        ids = choose_experts(logits, 1)[1].flatten()
        return m_grouped_fp8_gemm_nt_contiguous(a, b, torch.empty(tokens, 384).bfloat16(), ids), ids

    out, ids = emulator.execute(seed, op)
    expected = torch.empty_like(out)
    reference.contiguous_gemm(a, b, expected, ids)
    return h.relative_l2(out, expected)


def _sizes_by_choice() -> tuple[torch.Tensor, int]:
    """Returns logits float32 `[1, 64]` whose four best are 5, 9, 20 and 39 in this order, and 40, which bounds them."""
    logits, chosen = torch.zeros(1, 64), torch.tensor([5, 9, 20, 39])
    logits[0, chosen] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    return logits, 40


def masked_gemm_behind_choice(emulator: Device, seed: int, tokens: int = 9) -> float:
    """The number of rows of each group comes from the choice; tiles are those of `2 * tokens` rows per group."""
    gen, (logits, max_m) = h.seeded(0, CPU), _sizes_by_choice()
    x, scales = reference.quantize(h.random_tokens(gen, 4 * max_m, HIDDEN).view(4, max_m, HIDDEN))
    a = x, scales.mT.contiguous().mT  # K-major, so that no kernel copies them between the choice and the tiles
    b, out = h.random_weights(gen, 4, 384, HIDDEN), torch.zeros(4, max_m, 384).bfloat16()

    def op() -> torch.Tensor:
        counts = choose_experts(logits, 4)[1].flatten()
        m_grouped_fp8_gemm_nt_masked(a, b, out, counts, 2 * tokens)
        return counts

    with pytest.MonkeyPatch.context() as patch:  # a table that is read too early is empty, not wild
        patch.setattr(workspace, "scratch", lambda nbytes, like: torch.zeros(nbytes, dtype=torch.uint8))
        counts = emulator.execute(seed, op)
    expected = torch.zeros_like(out)
    reference.masked_gemm(a, b, expected, counts)
    return h.relative_l2(out, expected)


def psum_gemm_behind_choice(emulator: Device, seed: int, tokens: int = 9) -> float:
    """The end of each group comes from the choice; tiles are those of `2 * tokens` rows per group."""
    gen, (logits, rows) = h.seeded(0, CPU), _sizes_by_choice()
    a = reference.quantize(h.random_tokens(gen, rows, HIDDEN))
    b, out = h.random_weights(gen, 4, 384, HIDDEN), torch.zeros(rows, 384).bfloat16()

    def op() -> torch.Tensor:
        ends = choose_experts(logits, 4)[1].flatten()
        m_grouped_fp8_gemm_nt_psum(a, b, out, ends, 2 * tokens, 1)
        return ends

    ends = emulator.execute(seed, op)
    expected = torch.zeros_like(out)
    reference.psum_gemm(1, a, b, expected, ends)
    return h.relative_l2(out, expected)
