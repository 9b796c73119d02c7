"""`torch.autocast` changes no bit of a result: the ops choose their precision themselves."""

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.layers.fused_moe import FP8MoE
from fp8moe_plugin.layers.linear import FP8Linear
from tests import helpers as h
from tests.ops.test_bad_input import right_calls

OPS = list(right_calls(torch.device("cpu")))
autocast_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@autocast_dtypes
@pytest.mark.parametrize("op", OPS)
def test_an_op_gives_the_same_bits(device, op, dtype):
    plain, cast = (right_calls(device)[op] for _ in range(2))
    for call in (plain, cast):  # neither what an op does not write, nor what a call leaves uninitialized
        call |= {name: torch.ones_like(call[name]) for name in ("out", "bias", "c") if name in call}
    expected = getattr(ops, op)(**plain)
    with torch.autocast(device.type, dtype):
        actual = getattr(ops, op)(**cast)
    for a, e in zip(parts_of(actual), parts_of(expected), strict=True):
        assert a.dtype == e.dtype
        assert h.same_bits(a, e)


def parts_of(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@autocast_dtypes
@pytest.mark.parametrize("rows", [3, 200])
def test_layers_give_the_same_bits(device, rows, dtype):
    gen = h.seeded(0, device)
    x = h.random_tokens(gen, rows, 256)
    routing = h.random_routing(gen, "distinct", rows, 2, 4)
    weight, w13, w2 = (
        torch.randn(shape, generator=gen, device=device) for shape in ((64, 256), (4, 256, 256), (4, 256, 128))
    )
    bias = h.random_tokens(gen, 64)

    def results() -> list[torch.Tensor]:
        linear, experts = FP8Linear.from_bf16(weight, bias), FP8MoE.from_bf16(w13, w2)
        return [linear(x), experts(x, *routing)]

    expected = results()
    with torch.autocast(device.type, dtype):
        actual = results()
    assert all(h.same_bits(a, e) for a, e in zip(actual, expected, strict=True))
