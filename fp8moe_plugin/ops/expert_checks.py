"""Checks of the calls of `fused_moe`, `routed_moe` and `batched_experts`, except their values."""

from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import too_many_experts
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import SILU
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.ops.checks import (
    CheckedOnce,
    check_activations,
    check_multiple,
    check_shape,
    check_tensor,
    check_weights,
)
from fp8moe_plugin.ops.option_checks import check_factor, check_flag
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.settings import batch_invariant


class LayerFacts(NamedTuple):
    """The properties of a call's tensors that the plan of `fused_moe` depends on."""

    tokens: int
    shape: MoeShape
    shape_with_shared_expert: MoeShape  # `shape` if one of the experts is shared, and is not in `topk_ids`
    ids_64: bool
    mapped: bool  # there is an expert map
    specs: dict[tuple[bool, bool, float, bool], LayerSpec]  # by options: a spec takes the host 0.4 us to make

    def spec(self, ue8m0: bool, shared_expert: bool, routed_scale: float) -> LayerSpec:
        """Returns the spec of a call with these options."""
        options = ue8m0, shared_expert, routed_scale, batch_invariant()
        if (spec := self.specs.get(options)) is None:
            shape = self.shape_with_shared_expert if shared_expert else self.shape
            spec = self.specs[options] = called_spec(shape, ue8m0, shared_expert, routed_scale)
        return spec


def called_spec(shape: MoeShape, ue8m0: bool, shared_expert: bool = False, routed_scale: float = 1.0) -> LayerSpec:
    """Returns the spec of a layer that is called as an op: the one place where options of ops become a spec."""
    return LayerSpec(shape, FP8_BLOCK, ue8m0, SILU, False, shared_expert, routed_scale, batch_invariant())


@CheckedOnce
def check_layer_call(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
) -> LayerFacts:
    """Raise `InvalidInputError` unless these are valid tensors for `fused_moe`."""
    _check_tokens(hidden_states, w13, w13_scale, w2, w2_scale, out)
    tokens, device = hidden_states.shape[0], hidden_states.device
    check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(tokens, None), device=device)
    check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=tuple(topk_ids.shape), device=device)
    if expert_map is not None:
        check_tensor("expert_map", expert_map, dtype=torch.int32, shape=(None,), device=device)
        if not expert_map.numel():
            raise InvalidInputError(
                "expert_map is empty, needs one entry for each global expert. Pass None if topk_ids are local."
            )
    (experts, hidden, intermediate), topk = w2.shape, topk_ids.shape[1]
    known = experts if expert_map is None else expert_map.numel()
    shape = MoeShape(topk, hidden, intermediate, experts, known)
    with_shared = shape._replace(topk=topk + 1)
    return LayerFacts(tokens, shape, with_shared, topk_ids.dtype == torch.int64, expert_map is not None, {})


@CheckedOnce
def check_routed_call(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    logits: torch.Tensor,
    padding: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `routed_moe`."""
    _check_tokens(hidden_states, w13, w13_scale, w2, w2_scale, out)
    _check_logits(logits, padding, (len(hidden_states), len(w13)), hidden_states.device)


@CheckedOnce
def check_logits(logits: torch.Tensor, padding: torch.Tensor | None) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `choose_experts`."""
    _check_logits(logits, padding, (None, None), None)


def check_router(shared_expert: bool, routed_scale: float, expert_map: torch.Tensor | None) -> None:
    """Raise `InvalidInputError` unless these are valid options for `fused_moe`."""
    check_flag("shared_expert", shared_expert)
    if shared_expert and expert_map is not None:
        raise InvalidInputError(
            "shared_expert cannot be combined with expert_map: the ids must be local. Pass None as the expert_map, or "
            "compute the shared expert as a dense layer."
        )
    check_factor("routed_scale", routed_scale)


@CheckedOnce
def check_batched_call(
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `batched_experts`."""
    check_activations("hidden_states", (hidden_states, hidden_scale), dims=3)
    _check_layer(hidden_states, w13, w13_scale, w2, w2_scale)
    device = hidden_states.device
    check_shape("hidden_states", hidden_states, (w13.shape[0], None, None))
    check_tensor("expert_num_tokens", expert_num_tokens, dtype=torch.int32, shape=(w13.shape[0],), device=device)
    if out is not None:
        check_tensor("out", out, dtype=torch.bfloat16, shape=tuple(hidden_states.shape), device=device)


def _check_tokens(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    check_tensor("hidden_states", hidden_states, dtype=torch.bfloat16, shape=(None, None))
    check_multiple("hidden_states' H", hidden_states.shape[1], GROUP)
    _check_layer(hidden_states, w13, w13_scale, w2, w2_scale)
    if refusal := too_many_experts(w13.shape[0]):
        raise InvalidInputError(f"w13: {refusal}. Spread the experts over more GPUs (expert parallel).")
    if out is not None:
        shape = tuple(hidden_states.shape)
        check_tensor("out", out, dtype=torch.bfloat16, shape=shape, device=hidden_states.device)


def _check_logits(
    logits: torch.Tensor, padding: torch.Tensor | None, shape: tuple[int | None, ...], device: torch.device | None
) -> None:
    check_tensor("logits", logits, dtype=(torch.float32, torch.bfloat16), shape=shape, device=device)
    if padding is not None:
        check_tensor("padding", padding, dtype=torch.bool, shape=(len(logits),), device=logits.device)


def _check_layer(
    hidden_states: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> None:
    hidden, device = hidden_states.shape[-1], hidden_states.device
    check_weights("w13", (w13, w13_scale), 3, hidden, device)
    check_multiple("w13's second dimension", w13.shape[1], 2 * GROUP)
    check_weights("w2", (w2, w2_scale), 3, w13.shape[1] // 2, device)
    check_shape("w2", w2, (w13.shape[0], hidden, None))
