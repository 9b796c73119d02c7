"""No op computes a gradient, and each tells autograd so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.layers.fused_moe import FP8MoE
from fp8moe_plugin.layers.linear import FP8Linear
from fp8moe_plugin.ops import torch_ops
from tests import helpers as h
from tests.ops.test_bad_input import Call, right_calls

CPU = torch.device("cpu")
REFUSED = "requires a gradient, which this op does not compute. Call it under torch.inference_mode"


def parts_of(call: Call) -> list[tuple[str, int | None]]:
    """Returns the floating point tensors of a call: argument, and position in its pair."""
    found: list[tuple[str, int | None]] = []
    for name, value in call.items():
        if isinstance(value, tuple):
            found += [(name, 0), (name, 1)]
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append((name, None))
    return found


PARTS = [(op, *part) for op, call in right_calls(CPU).items() for part in parts_of(call)]


def with_grad(call: Call, argument: str, part: int | None) -> Call:
    value = call[argument]
    if part is None:
        return call | {argument: value.clone().requires_grad_()}
    pair = list(value)
    pair[part] = pair[part].clone().requires_grad_()
    return call | {argument: tuple(pair)}


@pytest.mark.parametrize(("op", "argument", "part"), PARTS)
def test_a_tensor_that_requires_a_gradient_is_refused(device, op, argument, part):
    right = right_calls(device)[op]
    getattr(ops, op)(**right)
    call = with_grad(right, argument, part)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=REFUSED):
            getattr(ops, op)(**call)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("op", "argument", "part"), PARTS)
def test_where_nothing_is_recorded_the_result_is_the_same(device, op, argument, part, mode):
    call = right_calls(device)[op]
    expected = tensors_of(getattr(ops, op)(**call))
    with mode():
        actual = tensors_of(getattr(ops, op)(**with_grad(call, argument, part)))
    assert all(h.same_bits(a, e) for a, e in zip(actual, expected, strict=True))


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Copies, because `out` is the same tensor for each call. Rows that an op does not write may hold NaN."""
    return [torch.nan_to_num(t.float()) for t in (result if isinstance(result, tuple) else (result,))]


def layers(device: torch.device) -> dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """Layers as functions of their tokens, and tokens."""
    gen = h.seeded(0, device)
    linear = FP8Linear.from_fp8(*h.random_weights(gen, 64, 256))
    experts = FP8MoE.from_fp8(*h.random_layer(gen, 4, 256, 128))
    routing = h.random_routing(gen, "distinct", 6, 2, 4)
    x = h.random_tokens(gen, 6, 256)
    return {"linear": (linear, x), "experts": (lambda tokens: experts(tokens, *routing), x)}


LAYERS = list(layers(CPU))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_refuses_tokens_that_require_a_gradient(device, kind):
    layer, x = layers(device)[kind]
    needs = x.clone().requires_grad_()
    with pytest.raises(InvalidInputError, match=REFUSED):
        layer(needs)
    with pytest.raises(InvalidInputError, match=REFUSED):
        layer(needs * 2)
    with torch.no_grad():
        assert h.same_bits(layer(needs), layer(x))
    assert h.same_bits(layer(needs.detach()), layer(x))


def test_a_router_that_is_trained_is_refused(device):
    gen = h.seeded(0, device)
    experts = FP8MoE.from_fp8(*h.random_layer(gen, 4, 256, 128))
    router, ids = h.random_routing(gen, "distinct", 6, 2, 4)
    with pytest.raises(InvalidInputError, match=f"topk_weights {REFUSED}"):
        experts(h.random_tokens(gen, 6, 256), router.requires_grad_(), ids)


@pytest.mark.parametrize("kind", LAYERS)
def test_transforms_that_differentiate_are_refused(device, kind):
    layer, x = layers(device)[kind]
    with pytest.raises(InvalidInputError, match=REFUSED):
        torch.func.grad(lambda tokens: layer(tokens).float().sum())(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_compiled_layer_refuses_tokens_that_require_a_gradient(device, kind, backend):
    layer, x = layers(device)[kind]
    compiled = torch.compile(lambda tokens: layer(tokens * 2), backend=backend)
    with pytest.raises(
        Exception, match=r"InvalidInputError.*requires a gradient"
    ):  # as torch reports an error while tracing
        compiled(x.clone().requires_grad_())
    with torch.no_grad():
        assert h.same_bits(compiled(x.clone().requires_grad_()), layer(x * 2))


def test_a_slice_that_requires_a_gradient_is_refused(device):
    gen = h.seeded(0, device)
    x = h.random_tokens(gen, 6, 512).requires_grad_()
    with pytest.raises(InvalidInputError, match=REFUSED):
        torch_ops.linear(x[:, :256], *h.random_weights(gen, 64, 256), None, False)


def test_forward_mode_differentiation_is_refused():
    gen = h.seeded(0, CPU)
    x, (weight, scale) = h.random_tokens(gen, 4, 256), h.random_weights(gen, 128, 256)
    layer = FP8Linear.from_fp8(weight, scale)
    for call in (lambda x: ops.fp8_linear(x, weight, scale), layer):
        call(x)
        with forward_ad.dual_level(), pytest.raises(InvalidInputError, match="x requires a gradient"):
            call(forward_ad.make_dual(x, torch.ones_like(x)))
        with forward_ad.dual_level():
            assert h.same_bits(call(x), call(x))
        with pytest.raises(InvalidInputError, match="x requires a gradient"):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))
