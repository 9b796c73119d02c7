"""Softmax top-k, and softmax top-k followed by a mixture-of-experts layer."""

from typing import Any

import torch

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.operands import LayerAddresses
from fp8moe_plugin.launches.sm90.router import choose_experts_launch
from fp8moe_plugin.ops import devices, router_reference, workspace
from fp8moe_plugin.ops.checks import debugs
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.expert_checks import called_options, check_routed_call
from fp8moe_plugin.ops.moe import run_fused_moe
from fp8moe_plugin.ops.option_checks import check_flag, check_int
from fp8moe_plugin.ops.router_checks import check_choice, check_topk
from fp8moe_plugin.plan.options import LayerOptions
from fp8moe_plugin.settings import batch_invariant


def choose_experts(
    logits: torch.Tensor,
    topk: int,
    *,
    renormalize: bool = True,
    padding: torch.Tensor | None = None,
    hidden_states: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `topk` experts with the largest logits for each token.

    Args:
        logits: float32 or bfloat16 `[T, E]`, E at most 512.
        topk: 1 to E, at most 32.
        renormalize: divide the weights of a token by their sum.
        padding: bool `[T]`, the tokens that get id -1 and weight 0; or None.
        hidden_states: bfloat16 `[T, H]`, only read with a `shared_gate`. H is a multiple of 8.
        shared_gate: bfloat16 `[1, H]`, the gate of a shared expert; or None.
    Returns:
        float32 weights, the softmax of the logits, and int32 ids, both `[T, topk]`; with a `shared_gate` weights are
        `[T, topk + 1]`, the last `sigmoid(shared_gate @ token)` in float32. The largest logit first, and the
        lower id first if logits are equal. vLLM's kernel ranks experts by the float32 softmax instead: the two orders
        differ only if different logits have equal softmax, by rounding or because both are 0.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, too many experts, a wrong topk.
        UnsupportedError: Triton kernels serve this GPU.
    """
    _, addresses = check_choice(logits, padding, hidden_states, shared_gate)
    tokens, experts = logits.shape
    check_topk(topk, experts)
    check_flag("renormalize", renormalize)
    device = devices.sm90_device_of(logits)
    if device is None:
        return router_reference.choose_experts(logits, topk, renormalize, padding, hidden_states, shared_gate)
    hidden = _hidden(shared_gate)
    weights, ids = _empty_choice(logits, topk, hidden > 0)
    if tokens:
        run = prepared_choice(device, tokens, experts, topk, hidden, logits.dtype == torch.bfloat16, renormalize)
        run((*addresses, weights.data_ptr(), ids.data_ptr()))
    return weights, ids


def routed_moe(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    logits: torch.Tensor,
    topk: int,
    *,
    renormalize: bool = True,
    padding: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    weights: WeightFormat = FP8_BLOCK,
    activation: str | Activation = "silu",
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the result of `choose_experts` for these logits `[T, E]`, then `fused_moe`, bit for bit.

    One call launches all kernels. In a small batch, the layer's first kernel starts before the experts are chosen.

    Args:
        shared_gate: bfloat16 `[1, H]`, the gate of a shared expert: the last expert of the tensors, which has no logit.
            None: there is no shared expert.
    Raises:
        InvalidInputError, UnsupportedError, WrongResultError: see `choose_experts` and `fused_moe`.
    """
    tensors = hidden_states, w13, w13_scale, w2, w2_scale, w13_bias, w2_bias, logits, padding, shared_gate, out
    options = called_options(weights, activation, ue8m0, shared_expert=shared_gate is not None)
    return run_routed_moe(options, topk, renormalize, tensors)


def run_routed_moe(options: LayerOptions, topk: int, renormalize: bool, tensors: tuple[Any, ...]) -> torch.Tensor:
    """Run `routed_moe` on its tensors; `padding`, `shared_gate` and `out`, the last three, may be None."""
    check_int("topk", topk)
    facts, addresses = check_routed_call(options, batch_invariant(), topk)(*tensors)
    *layer, logits, padding, shared_gate = tensors[:-1]
    out: torch.Tensor = tensors[-1]
    x, (tokens, experts) = layer[0], logits.shape
    check_topk(topk, experts)
    check_flag("renormalize", renormalize)
    device = devices.device_of(x)
    if device is None or not device.backend.has_all_ops or not tokens or debugs(x.is_cuda):
        router = {"renormalize": renormalize, "padding": padding, "hidden_states": x, "shared_gate": shared_gate}
        weights, ids = choose_experts(logits, topk, **router)
        return run_fused_moe(options, (x, None, *layer[1:], weights, ids, None, out))
    plan = device.backend.plan_layer(facts.spec, tokens, device.multiprocessors)
    weights, ids = _empty_choice(logits, topk, facts.spec.shared_gate)
    if out is None:
        out = torch.empty_like(x)
        addresses = *addresses[:-1], out.data_ptr()
    scratch = workspace.scratch(plan.scratch, x)
    hidden, logits_bf16 = _hidden(shared_gate), logits.dtype == torch.bfloat16
    run = prepared_routed_layer(device, plan, tokens, experts, topk, hidden, logits_bf16, renormalize)
    run((*addresses, weights.data_ptr(), ids.data_ptr(), scratch.data_ptr()))
    return out


def _hidden(shared_gate: torch.Tensor | None) -> int:
    """Returns the hidden size of a layer with a shared gate, else 0."""
    return 0 if shared_gate is None else shared_gate.shape[1]


def _empty_choice(logits: torch.Tensor, topk: int, shared_gate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uninitialized weights and ids."""
    tokens, device = len(logits), logits.device
    weights = workspace.empty((tokens, topk + shared_gate), torch.float32, device)
    return weights, workspace.empty((tokens, topk), torch.int32, device)


@prepares("choose_experts")
def prepared_choice(
    device: Device, tokens: int, experts: int, topk: int, hidden: int, logits_bf16: bool, renormalize: bool
) -> Prepared:
    """Returns a callable that launches `choose_experts`, given addresses: see `choose_experts_launch`."""
    sizes = {"tokens": tokens, "experts": experts, "topk": topk, "hidden": hidden}
    slots = map(Slot, range(6))
    return device.prepare([choose_experts_launch(*slots, **sizes, logits_bf16=logits_bf16, renormalize=renormalize)])


@prepares("routed_moe")
def prepared_routed_layer(
    device: Device, plan: Plan, tokens: int, experts: int, topk: int, hidden: int, logits_bf16: bool, renormalize: bool
) -> Prepared:
    """Returns a callable that launches `routed_moe`.

    Its addresses are those of the tensors that `check_routed_call` checks, then of the router's weights and ids, and of
    the layer's scratch.
    """
    x, *layer, logits, padding, gate, out, weights, ids, scratch = map(Slot, range(14))
    tensors = LayerAddresses._make((x, 0, *layer, weights, ids, 0, out, scratch))
    first, *rest = plan.launches(tensors, ids_64=False)
    if plan.starts_before_ids:
        first = first._replace(pdl=True)
    choice = choose_experts_launch(
        logits,
        padding,
        x,
        gate,
        weights,
        ids,
        tokens=tokens,
        experts=experts,
        topk=topk,
        hidden=hidden,
        logits_bf16=logits_bf16,
        renormalize=renormalize,
    )
    return device.prepare([choice, first, *rest])
