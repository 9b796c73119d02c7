"""Checks of the calls of `fused_moe`, `routed_moe` and `batched_experts`, except their values."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import too_many_experts
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import Activation, check_activation
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.ops import devices, reference
from fp8moe_plugin.ops.checks import (
    FP8,
    CheckedOnce,
    check_activations,
    check_multiple,
    check_shape,
    check_tensor,
    check_weights,
)
from fp8moe_plugin.ops.option_checks import as_activation, check_factor, check_flag, check_format
from fp8moe_plugin.ops.router_checks import check_logits, check_shared_gate
from fp8moe_plugin.ops.signature import MAX_SIGNATURES
from fp8moe_plugin.plan.options import LayerOptions, layer_options
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape

# w13 and w2, each with its scales, and both biases or none.
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class LayerFacts(NamedTuple):
    """The properties of a call that its plan and its launches depend on."""

    spec: LayerSpec
    tokens: int
    ids_64: bool = False
    mapped: bool = False  # there is an expert map


def called_options(
    weights: WeightFormat,
    activation: str | Activation,
    ue8m0: bool,
    shared_expert: bool = False,
    routed_scale: float = 1.0,
) -> LayerOptions:
    """Returns the options of a call in Python. Raises `InvalidInputError` if one is not valid."""
    if isinstance(activation, Activation):
        check_activation(activation)  # here, because a limit of True has the hash of 1.0, and a list has none
    given = weights, activation, ue8m0, shared_expert, routed_scale
    try:
        return _valid_options(*given)
    except TypeError:  # one of them has no hash
        return _valid_options.__wrapped__(*given)


@functools.lru_cache(maxsize=MAX_SIGNATURES, typed=True)  # typed: True is a valid flag, but 1.0 is not
def _valid_options(
    weights: WeightFormat, activation: str | Activation, ue8m0: bool, shared_expert: bool, routed_scale: float
) -> LayerOptions:
    check_format(weights)
    check_flag("ue8m0", ue8m0)
    check_flag("shared_expert", shared_expert)
    check_factor("routed_scale", routed_scale)
    return layer_options(weights, ue8m0, as_activation(activation), shared_expert, routed_scale)


def checked_for_options(
    check: Callable[..., LayerFacts],
) -> "functools._lru_cache_wrapper[CheckedOnce[LayerFacts]]":
    """Decorates checks of tensors that also depend on the arguments before them.

    The decorated function takes `LayerOptions`, `batch_invariant()` and other arguments of `check` before the tensors.
    It returns the checks of the tensors, which run once per signature.
    """

    @functools.lru_cache(maxsize=MAX_SIGNATURES)
    def checked(*given: object) -> CheckedOnce[LayerFacts]:
        return CheckedOnce(functools.partial(check, *given))

    return checked


@checked_for_options
def check_layer_call(
    options: LayerOptions,
    batch_invariant: bool,
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
) -> LayerFacts:
    """Raise `InvalidInputError` unless these are valid tensors for `fused_moe`."""
    layer = w13, w13_scale, w2, w2_scale, w13_bias, w2_bias
    _check_tokens(options.weights, hidden_states, layer, out, (torch.bfloat16, FP8))
    arrival = _check_arrival(hidden_states, hidden_scale)
    tokens, device = hidden_states.shape[0], hidden_states.device
    check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(tokens, None), device=device)
    check_tensor("topk_weights", topk_weights, dtype=torch.float32, device=device)
    topk = topk_ids.shape[1]
    gated = options.shared_expert and topk_weights.shape[1:] == (topk + 1,)
    check_shape("topk_weights", topk_weights, (tokens, topk + gated))
    if expert_map is not None:
        check_tensor("expert_map", expert_map, dtype=torch.int32, shape=(None,), device=device)
        if not expert_map.numel():
            raise InvalidInputError(
                "expert_map is empty, needs one entry for each global expert. Pass None if topk_ids are local."
            )
        if options.shared_expert:
            raise InvalidInputError(
                "shared_expert cannot be combined with expert_map: the ids must be local. Pass None as the "
                "expert_map, or compute the shared expert as a dense layer."
            )
    topk, known = topk + options.shared_expert, None if expert_map is None else expert_map.numel()
    spec = _called_spec(options, batch_invariant, layer, hidden_states.shape[1], topk, arrival, known, gated)
    return LayerFacts(spec, tokens, topk_ids.dtype == torch.int64, expert_map is not None)


@checked_for_options
def check_routed_call(
    options: LayerOptions,
    batch_invariant: bool,
    topk: int,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    logits: torch.Tensor,
    padding: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    out: torch.Tensor | None,
) -> LayerFacts:
    """Raise `InvalidInputError` unless these are valid tensors for `routed_moe`."""
    layer = w13, w13_scale, w2, w2_scale, w13_bias, w2_bias
    _check_tokens(options.weights, hidden_states, layer, out)
    shared, gated, hidden = options.shared_expert, shared_gate is not None, hidden_states.shape[1]
    check_logits(logits, padding, (len(hidden_states), len(w13) - shared), hidden_states.device)
    if shared_gate is not None:
        check_shared_gate(shared_gate, hidden_states)
        if not shared:
            raise InvalidInputError("shared_gate is not None, but the layer has no shared expert. Pass None.")
    spec = _called_spec(options, batch_invariant, layer, hidden, topk + shared, Arrival.STANDARD, shared_gate=gated)
    return LayerFacts(spec, len(hidden_states))


@checked_for_options
def check_batched_call(
    options: LayerOptions,
    batch_invariant: bool,
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_num_tokens: torch.Tensor,
    out: torch.Tensor | None,
) -> LayerFacts:
    """Raise `InvalidInputError` unless these are valid tensors for `batched_experts`."""
    check_activations("hidden_states", (hidden_states, hidden_scale), dims=3)
    layer = w13, w13_scale, w2, w2_scale, w13_bias, w2_bias
    _check_layer(options.weights, hidden_states, layer)
    device = hidden_states.device
    check_shape("hidden_states", hidden_states, (w13.shape[0], None, None))
    check_tensor("expert_num_tokens", expert_num_tokens, dtype=torch.int32, shape=(w13.shape[0],), device=device)
    if out is not None:
        check_tensor("out", out, dtype=torch.bfloat16, shape=tuple(hidden_states.shape), device=device)
    if options.shared_expert or options.routed_scale != 1.0:
        raise InvalidInputError(
            "batched_experts computes no shared expert and no routed_scale: each row has one expert and no weight. "
            "Apply them where the rows of a token are added up."
        )
    _, max_m, hidden = hidden_states.shape
    spec = _called_spec(options, batch_invariant, layer, hidden, 1, Arrival.BATCHED)  # a row has one expert
    return LayerFacts(spec, max_m)


def _called_spec(
    options: LayerOptions,
    batch_invariant: bool,
    layer: Layer,
    hidden: int,
    topk: int,
    arrival: Arrival,
    global_experts: int | None = None,
    shared_gate: bool = False,
) -> LayerSpec:
    """Returns the spec of a call. Raises `InvalidInputError` for a layer that is not computed on the tensors' device.

    This is the one place where a call becomes a spec.

    Args:
        layer: tensors that have been checked.
    """
    check_factor("routed_scale", options.routed_scale)
    if shared_gate and options.routed_scale != 1.0:
        raise InvalidInputError(
            f"routed_scale is {options.routed_scale}, needs 1.0 if topk_weights have a column for the shared expert. "
            "Multiply the others by it."
        )
    (w13, _, w2, _, bias, _), tensor = layer, options.weights.weight
    shape = MoeShape.of_w13(options.weights, w13.shape, hidden, topk, global_experts)
    further = tensor.further_steps(w13.shape, hidden), tensor.further_steps(w2.shape, shape.intermediate)
    spec = options.spec(shape, batch_invariant)._replace(
        shared_gate=shared_gate,
        bias=bias is not None,
        further_steps=further,
        quantized=arrival is Arrival.QUANTIZED,
    )
    backend = devices.backend_of(w2)
    if refusal := backend.refusal(spec, arrival) if backend else reference.refusal(spec):
        name = f"{backend.name} kernels do" if backend else "reference does"
        raise InvalidInputError(
            f"The layer has {refusal}, which the {name} not compute. Use another implementation for this layer."
        )
    return spec


def _check_arrival(hidden_states: torch.Tensor, hidden_scale: torch.Tensor | None) -> Arrival:
    """Returns how tokens arrive that have been checked. Raises `InvalidInputError` unless these are their scales."""
    if hidden_states.dtype != FP8:
        if hidden_scale is not None:
            raise InvalidInputError(
                "hidden_scale is not None, but hidden_states is in bfloat16 and has no scales. Pass None, or tokens in "
                f"{FP8}."
            )
        return Arrival.STANDARD
    if hidden_scale is None:
        raise InvalidInputError(
            f"hidden_scale is None, but hidden_states has dtype {FP8}. Pass the scales of its groups of {GROUP} "
            "channels, or tokens in bfloat16."
        )
    shape = len(hidden_states), hidden_states.shape[1] // GROUP
    check_tensor("hidden_scale", hidden_scale, dtype=torch.float32, shape=shape, device=hidden_states.device)
    return Arrival.QUANTIZED


def _check_tokens(
    weights: WeightFormat,
    hidden_states: torch.Tensor,
    layer: Layer,
    out: torch.Tensor | None,
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.bfloat16,
) -> None:
    check_tensor("hidden_states", hidden_states, dtype=dtype, shape=(None, None))
    check_multiple("hidden_states' H", hidden_states.shape[1], GROUP)
    _check_layer(weights, hidden_states, layer)
    if refusal := too_many_experts(len(layer[0])):
        raise InvalidInputError(f"w13: {refusal}. Spread the experts over more GPUs (expert parallel).")
    if out is not None:
        shape = tuple(hidden_states.shape)
        check_tensor("out", out, dtype=torch.bfloat16, shape=shape, device=hidden_states.device)


def _check_layer(weights: WeightFormat, hidden_states: torch.Tensor, layer: Layer) -> None:
    w13, w13_scale, w2, w2_scale, w13_bias, w2_bias = layer
    hidden, device = hidden_states.shape[-1], hidden_states.device
    check_weights("w13", (w13, w13_scale), 3, hidden, device, weights)
    experts, gate_up, _ = weights.weight.channels(w13.shape)
    check_multiple("w13's second dimension", gate_up, 2 * GROUP)
    if (further := weights.weight.further_steps(w13.shape, hidden)) % 2:
        raise InvalidInputError(
            f"w13 has {further} further steps, needs an even number: as many for the gate as for the up projection. "
            "Pack it with ops.mxfp4."
        )
    check_weights("w2", (w2, w2_scale), 3, gate_up // 2, device, weights)
    check_shape("w2", w2, (experts, weights.weight.shape(hidden, gate_up)[0], None))
    if (w13_bias is None) != (w2_bias is None):
        raise InvalidInputError("One of w13_bias and w2_bias is None. Pass both, zeros for one that a layer lacks.")
    for name, bias, rows in (("w13_bias", w13_bias, gate_up), ("w2_bias", w2_bias, hidden)):
        if bias is not None:
            check_tensor(name, bias, dtype=torch.float32, shape=(experts, rows), device=device)
