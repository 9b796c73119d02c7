"""The ops of a layer pass all its options on, and refuse a layer that is not computed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.ops import reference, torch_ops
from fp8moe_plugin.ops.expert_checks import check_batched_call, check_layer_call, check_routed_call
from fp8moe_plugin.ops.moe import LAYER
from fp8moe_plugin.plan import options
from fp8moe_plugin.plan.options import layer_options
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h
from tests.formats import fp4
from tests.ops.test_bad_input import BATCHED, EXPERTS, HIDDEN, INTERMEDIATE, MOE, ROUTED, right_calls

CPU = torch.device("cpu")
OPS = pytest.mark.parametrize("op", [MOE, ROUTED, BATCHED])


def call_torch_op(op: str, text: str, **changed: Any) -> None:
    """Call the torch op with the arguments of a right call."""
    call = {"hidden_scale": None, "expert_map": None, "shared_gate": None} | right_calls(CPU)[op] | changed
    names = [argument.name for argument in getattr(torch_ops, op)._schema.arguments[1:]]
    getattr(torch_ops, op)(text, *(call[name] for name in names))


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LayerSpec]]:
    """The specs that the reference computes; it accepts any layer, and does nothing."""
    seen: list[LayerSpec] = []
    monkeypatch.setattr(reference, "refusal", lambda spec: None)
    for name in ("fused_moe", "batched_experts"):
        monkeypatch.setattr(reference, name, lambda spec, *args: seen.append(spec))
    yield seen
    for check in (check_layer_call, check_routed_call, check_batched_call):
        check.cache_clear()


@OPS
def test_a_torch_op_passes_all_options_on(specs, op):
    activation, router = Activation("gelu", 7.0, 1.5, 1.0), {} if op == BATCHED else {"routed_scale": 2.5}
    call_torch_op(op, layer_options(ue8m0=True, activation=activation, **router).text)
    topk = 1 if op == BATCHED else 2
    shape = MoeShape(topk, HIDDEN, INTERMEDIATE, EXPERTS, EXPERTS)
    assert specs == [LayerSpec(shape, ue8m0=True, activation=activation, bias=True, **router)]


@OPS
def test_a_public_op_takes_an_activation(specs, op):
    getattr(ops, op)(**right_calls(CPU)[op] | {"activation": Activation(limit=7.0)})
    getattr(ops, op)(**right_calls(CPU)[op] | {"activation": "silu"})
    assert [spec.activation for spec in specs] == [Activation(limit=7.0), Activation()]


@OPS
@pytest.mark.parametrize("on_a_device", [False, True])
def test_a_layer_that_is_not_computed_is_refused(monkeypatch, op, on_a_device):
    if on_a_device:
        h.serve(monkeypatch, h.Recorder())
    computes = "sm90 kernels do" if on_a_device else "reference does"
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=rf"has .*\(gelu\), which the {computes} not compute\. Use"):
            getattr(ops, op)(**right_calls(CPU)[op] | {"activation": Activation("gelu")})


@OPS
@pytest.mark.parametrize("activation", ["gelu", 0, None, [], torch.zeros(())], ids=str)
def test_what_names_no_activation_is_refused(op, activation):
    with pytest.raises(InvalidInputError, match=r"activation is .*, needs 'silu'.*, or an Activation"):
        getattr(ops, op)(**right_calls(CPU)[op] | {"activation": activation})


@OPS
@pytest.mark.parametrize(
    "activation",
    [
        Activation(limit="7"),
        Activation(limit=True),
        Activation(limit=10**5000),
        Activation(limit=torch.tensor(7.0)),
        Activation([]),
        Activation("swigluoai_uninterleave", 7.0, "1"),
    ],
    ids=lambda given: "-".join(type(value).__name__ for value in given),
)
def test_an_activation_of_other_types_is_refused(op, activation):
    layer_options(activation=Activation(limit=1.0))  # equals the one with True
    for called in (op, "silu_mul_quant_fp8"):
        with pytest.raises(InvalidInputError, match="activation is "):
            getattr(ops, called)(**right_calls(CPU)[called] | {"activation": activation})


@pytest.mark.parametrize("values", [{"shared_expert": True}, {"routed_scale": 2.0}], ids=str)
def test_batched_experts_refuse_what_belongs_to_the_router(values):
    with pytest.raises(InvalidInputError, match="computes no shared expert and no routed_scale"):
        call_torch_op(BATCHED, layer_options(**values).text)


def test_a_gate_belongs_to_a_shared_expert():
    with pytest.raises(InvalidInputError, match="shared_gate is not None, but the layer has no shared expert"):
        call_torch_op(ROUTED, layer_options().text, shared_gate=torch.zeros(1, HIDDEN, dtype=torch.bfloat16))


def test_a_shared_expert_has_no_logits():
    call, text = right_calls(CPU)[ROUTED], layer_options(shared_expert=True).text
    logits, routed, out = call["logits"][:, 1:].contiguous(), *(torch.empty_like(call["out"]) for _ in range(2))
    call_torch_op(ROUTED, text, logits=logits, out=routed)
    weights, ids = ops.choose_experts(logits, 2, padding=call["padding"])
    call = {name: call[name] for name in ("hidden_states", *LAYER)}
    call_torch_op(MOE, text, **call, topk_weights=weights, topk_ids=ids, expert_map=None, out=out)
    assert h.same_bits(routed, out)


def test_the_weights_of_a_shared_expert_are_not_scaled():
    call, text = right_calls(CPU)[MOE], layer_options(shared_expert=True, routed_scale=2.0).text
    weights = torch.nn.functional.pad(call["topk_weights"], (0, 1))
    with pytest.raises(InvalidInputError, match=r"routed_scale is 2\.0, needs 1\.0 if topk_weights have a column for"):
        call_torch_op(MOE, text, topk_weights=weights, expert_map=None)


@pytest.mark.parametrize("op", [MOE, ROUTED])
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-46, float("nan"), float("inf")])
def test_a_torch_op_refuses_a_scale_that_is_no_factor(op, scale):
    with pytest.raises(InvalidInputError, match="routed_scale is"):
        call_torch_op(op, layer_options(routed_scale=scale).text)


@pytest.fixture
def fp4_layer(monkeypatch: pytest.MonkeyPatch) -> h.Layer:
    """The tensors of experts in 4 bits."""
    monkeypatch.setattr(options, "FORMATS", (*options.FORMATS, fp4.FP4))
    sizes = {"w13": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
    tensors = {name: fp4.codes(EXPERTS, n, k // 2) for name, (n, k) in sizes.items()}
    scales = {f"{name}_scale": fp4.codes(EXPERTS, n, k // 32) for name, (n, k) in sizes.items()}
    return h.Layer(**tensors, **{name: scale.view(torch.float8_e8m0fnu) for name, scale in scales.items()})


@OPS
def test_sizes_of_packed_weights_follow_from_the_format(specs, fp4_layer, op):
    call_torch_op(op, layer_options(fp4.FP4).text, **fp4_layer._asdict())
    assert specs[0].shape[1:] == (HIDDEN, INTERMEDIATE, EXPERTS, EXPERTS)
    assert specs[0].weights is fp4.FP4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13": lambda w: w.view(torch.int8)}, "w13 has dtype torch.int8, needs torch.uint8"),
        ({"w13": lambda w: w[..., :64].contiguous()}, "w13 has shape [4, 256, 64], needs [any, any, 128]"),
        ({"w13_scale": torch.Tensor.float}, "w13's scales has dtype torch.float32, needs torch.float8_e8m0fnu"),
        ({"w2_scale": lambda s: s[..., :2].contiguous()}, "w2's scales has shape [4, 256, 2], needs [4, 256, 4]"),
        (
            {"w2": lambda w: w[:, :128].contiguous(), "w2_scale": lambda s: s[:, :128].contiguous()},
            "w2 has shape [4, 128, 64], needs [4, 256, any]",
        ),
    ],
)
@OPS
def test_tensors_are_checked_by_the_format(specs, fp4_layer, op, change, message):
    tensors = fp4_layer._asdict()
    wrong = tensors | {name: changed(tensors[name]) for name, changed in change.items()}
    with pytest.raises(InvalidInputError) as error:
        call_torch_op(op, layer_options(fp4.FP4).text, **wrong)
    assert message in str(error.value)


@OPS
def test_tensors_are_checked_again_for_another_format(fp4_layer, op):
    call_torch_op(op, layer_options().text)
    with pytest.raises(InvalidInputError, match=r"w13 has dtype torch.float8_e4m3fn, needs torch.uint8"):
        call_torch_op(op, layer_options(fp4.FP4).text)
