"""Triton kernels on a Hopper GPU: codes and scales with the bits of the CUDA kernels', and small batches."""

from collections.abc import Callable

import pytest
import torch

from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.ops import fused_moe, per_token_group_quant_fp8, silu_mul_quant_fp8
from fp8moe_plugin.ops.devices import Gpu
from fp8moe_plugin.ops.fp4_blocks import SPAN
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.triton.catalog import PACKED_TILE_ROWS
from tests import helpers as h
from tests.mxfp4 import random_experts
from tests.triton.plans import force_step

pytestmark = pytest.mark.gpu
ue8m0s = pytest.mark.parametrize("ue8m0", [False, True])


def assert_equal_on_both(op: Callable[[], h.Quantized]) -> None:
    h.assert_same_numbers(*(_on(target, op) for target in ("sm_90", SM90)))


def _on(target: str, op: Callable[[], h.Quantized]) -> h.Quantized:
    with pytest.MonkeyPatch.context() as patch:
        h.serve(patch, gpu(target))
        return op()


def gpu(target: str) -> Gpu:
    return Gpu(0, torch.cuda.get_device_properties(0).multi_processor_count, BACKENDS[target])


@ue8m0s
def test_quantize_of_any_bits(ue8m0: bool) -> None:
    gen = h.seeded(0, torch.device("cuda", 0))
    anything = torch.randint(-(2**15), 2**15, (300, 384), generator=gen, device=gen.device).to(torch.int16)
    numbers = h.random_tokens(gen, 300, 384) * torch.randint(0, 2, (300, 384), generator=gen, device=gen.device)
    x = torch.cat([anything.view(torch.bfloat16), numbers.bfloat16(), -numbers.bfloat16()])
    assert_equal_on_both(lambda: per_token_group_quant_fp8(x, ue8m0=ue8m0))


@pytest.mark.parametrize(
    ("activation", "ue8m0"), [(SILU, False), (SILU, True), *((activation, False) for activation in h.MODIFIED)]
)
def test_silu_of_every_gate(activation: Activation, ue8m0: bool) -> None:
    gen = h.seeded(1, torch.device("cuda", 0))
    gate = torch.arange(2**16, device=gen.device).to(torch.int16).view(torch.bfloat16).view(1, 512, 128)
    up = h.random_tokens(gen, 1, 512, 128) * torch.randint(0, 2, (1, 512, 128), generator=gen, device=gen.device)
    gate_up, counts = torch.cat([gate, up.bfloat16()], -1), torch.tensor([512], dtype=torch.int32, device=gen.device)
    assert_equal_on_both(lambda: silu_mul_quant_fp8(gate_up, counts, ue8m0, activation))


@pytest.mark.parametrize("kind", h.ROUTINGS)
@pytest.mark.parametrize(
    ("topk", "hidden", "intermediate"), [(1, 128, 128), (3, 896, 384), (8, 2048, 768), (8, 7168, 256)]
)
def test_small_batches(monkeypatch: pytest.MonkeyPatch, topk: int, hidden: int, intermediate: int, kind: str) -> None:
    """A token has the same bits in any small batch."""
    h.serve(monkeypatch, gpu("sm_90"))
    force_step(monkeypatch, None)
    gen, experts = h.seeded(2, torch.device("cuda", 0)), 12
    layer, x = h.random_layer(gen, experts, hidden, intermediate), h.random_tokens(gen, 5, hidden)
    weights, ids = h.random_routing(gen, kind, 5, topk, experts)
    out = fused_moe(x, *layer, weights, ids)
    expected = h.layer_reference(x, layer, weights, ids, quantized=True)
    assert h.relative_l2(out, expected) <= 3e-3  # rows of experts are not rounded to bfloat16
    for token in (0, 4):
        of_token = slice(token, token + 1)
        assert h.same_bits(fused_moe(x[of_token], *layer, weights[of_token], ids[of_token]), out[of_token])


@pytest.mark.parametrize("span", [SPAN, 30])  # with 30, blocks take further steps
@pytest.mark.parametrize(("tokens", "tile_rows"), [(3, PACKED_TILE_ROWS[0]), (200, PACKED_TILE_ROWS[1])])
@pytest.mark.parametrize(("topk", "hidden", "intermediate"), [(1, 128, 128), (3, 896, 384), (6, 4096, 256)])
def test_packed_weights(
    monkeypatch: pytest.MonkeyPatch, topk: int, hidden: int, intermediate: int, tokens: int, tile_rows: int, span: int
) -> None:
    gen, experts = h.seeded(3, torch.device("cpu")), 6
    layer, x = random_experts(gen, experts, hidden, intermediate, span).packed(), h.random_tokens(gen, tokens, hidden)
    call = x, *layer, *h.random_routing(gen, "distinct", tokens, topk, experts)
    expected = fused_moe(*call, weights=PACKED_MXFP4)
    h.serve(monkeypatch, gpu("sm_90"))
    force_step(monkeypatch, tile_rows)
    out = fused_moe(*(tensor.cuda() for tensor in call), weights=PACKED_MXFP4)
    assert h.relative_l2(out.cpu(), expected) <= 2e-2
