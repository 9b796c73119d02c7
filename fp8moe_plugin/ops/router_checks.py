"""Checks of the tensors of a router, except their values."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.launches.sm90.router import VECTOR
from fp8moe_plugin.ops.checks import CheckedOnce, check_multiple, check_tensor
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.plan.sm90.constants import MAX_ROUTER_EXPERTS, MAX_ROUTER_TOPK


@CheckedOnce
def check_choice(
    logits: torch.Tensor,
    padding: torch.Tensor | None,
    hidden_states: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
) -> None:
    """Raise `InvalidInputError` unless these are valid tensors for `choose_experts`."""
    check_logits(logits, padding, (None, None), None)
    if hidden_states is not None:
        shape = len(logits), None
        check_tensor("hidden_states", hidden_states, dtype=torch.bfloat16, shape=shape, device=logits.device)
    if shared_gate is not None:
        check_shared_gate(shared_gate, hidden_states)


def check_logits(
    logits: torch.Tensor, padding: torch.Tensor | None, shape: tuple[int | None, ...], device: torch.device | None
) -> None:
    """Raise `InvalidInputError` unless these are logits of this shape, and the padding of their tokens or None."""
    check_tensor("logits", logits, dtype=(torch.float32, torch.bfloat16), shape=shape, device=device)
    if padding is not None:
        check_tensor("padding", padding, dtype=torch.bool, shape=(len(logits),), device=logits.device)


def check_shared_gate(shared_gate: torch.Tensor, hidden_states: torch.Tensor | None) -> None:
    """Raise `InvalidInputError` unless this is a gate of the shared expert of these tokens, which have been checked."""
    if hidden_states is None:
        raise InvalidInputError("hidden_states is None, but shared_gate is not: it weighs the tokens. Pass both.")
    hidden = hidden_states.shape[1]
    check_multiple("hidden_states' H", hidden, VECTOR)
    check_tensor("shared_gate", shared_gate, dtype=torch.bfloat16, shape=(1, hidden), device=hidden_states.device)


def check_topk(topk: int, experts: int) -> None:
    """Raise `InvalidInputError` unless the kernel supports choosing `topk` of `experts` experts."""
    check_int("topk", topk)
    if experts > MAX_ROUTER_EXPERTS:
        raise InvalidInputError(
            f"logits are of {experts} experts, the kernel takes up to {MAX_ROUTER_EXPERTS}. Choose experts in another "
            "way, and pass them to fused_moe."
        )
    most = min(experts, MAX_ROUTER_TOPK)
    if not 0 < topk <= most:
        raise InvalidInputError(f"topk is {topk}, needs 1 to {most}.")
