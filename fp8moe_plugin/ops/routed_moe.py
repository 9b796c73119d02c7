"""Softmax top-k, and a mixture-of-experts layer behind it."""

import torch

from fp8moe_plugin.checkpoint.shapes import ceil_div
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launch import Launch, Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference, workspace
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import debugs
from fp8moe_plugin.ops.expert_checks import check_logits, check_routed_call
from fp8moe_plugin.ops.moe import fused_moe, plan_layer
from fp8moe_plugin.ops.moe_launches import layer_launches
from fp8moe_plugin.ops.operands import LayerAddresses, Router
from fp8moe_plugin.ops.option_checks import check_flag, check_int
from fp8moe_plugin.ops.signature import addresses_of
from fp8moe_plugin.plan import MoeShape, SmallBatchStep, StepPlan
from fp8moe_plugin.plan.catalog import SM90, choose_experts_key
from fp8moe_plugin.plan.constants import MAX_ROUTER_EXPERTS, MAX_ROUTER_TOPK
from fp8moe_plugin.plan.triton_step import TritonStepPlan

WARP = 32  # threads, which share a token
LOGITS, PADDING, WEIGHTS, IDS = map(Slot, range(4))  # in the addresses of each call


def choose_experts(
    logits: torch.Tensor, topk: int, *, renormalize: bool = True, padding: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` experts of each token with the largest logits.

    Args:
        logits: float32 or bfloat16 `[T, E]`, E at most 512.
        topk: 1 to E, at most 32.
        renormalize: divide the weights of a token by their sum.
        padding: bool `[T]`, the tokens that get id -1 and weight 0; or None.
    Returns:
        float32 weights, the softmax of the logits, and int32 ids, both `[T, topk]`: the largest logit first, of equal
        ones that with the lower id. Experts are ranked by their logits, not by the float32 softmax as in vLLM's kernel:
        the two orders differ only where different logits have equal softmax, by rounding or because both are 0.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, too many experts, a wrong topk.
        UnsupportedError: Triton kernels serve this GPU.
    """
    _, addresses = check_logits(logits, padding)
    tokens, experts = logits.shape
    check_topk(topk, experts)
    check_flag("renormalize", renormalize)
    device = backend.sm90_device_of(logits)
    if device is None:
        return reference.choose_experts(logits, topk, renormalize, padding)
    weights, ids = _empty_choice(logits, topk)
    if tokens:
        run = prepared_choice(device, tokens, experts, topk, logits.dtype == torch.bfloat16, renormalize)
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
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_moe` with the weights and ids that `choose_experts` returns for these logits `[T, E]`: the same bits.

    One call launches all kernels. Those of a small batch also start before the experts are chosen.

    Raises:
        InvalidInputError, UnsupportedError, WrongResultError: what either of them raises.
    """
    layer = hidden_states, w13, w13_scale, w2, w2_scale
    check_routed_call(*layer, logits, padding, out)
    tokens, (experts, hidden, intermediate) = len(logits), w2.shape
    check_topk(topk, experts)
    check_flag("renormalize", renormalize)
    check_flag("ue8m0", ue8m0)
    device = backend.device_of(hidden_states)
    if device is None or device.target != SM90 or not tokens or debugs(hidden_states.is_cuda):
        weights, ids = choose_experts(logits, topk, renormalize=renormalize, padding=padding)
        return fused_moe(*layer, weights, ids, ue8m0=ue8m0, out=out)
    step = plan_layer(device, MoeShape(topk, hidden, intermediate, experts, experts), tokens, ue8m0)
    weights, ids = _empty_choice(logits, topk)
    out = torch.empty_like(hidden_states) if out is None else out
    scratch = workspace.scratch(step.scratch.nbytes, hidden_states)
    run = prepared_routed_layer(device, step, logits.dtype == torch.bfloat16, renormalize)
    run(addresses_of((logits, padding, weights, ids, *layer, out, scratch)))
    return out


def check_topk(topk: int, experts: int) -> None:
    """Raise `InvalidInputError` unless the kernel can choose so many of so many experts."""
    check_int("topk", topk)
    if experts > MAX_ROUTER_EXPERTS:
        raise InvalidInputError(
            f"logits are of {experts} experts, the kernel takes up to {MAX_ROUTER_EXPERTS}. Choose experts in another "
            "way, and pass them to fused_moe."
        )
    most = min(experts, MAX_ROUTER_TOPK)
    if not 0 < topk <= most:
        raise InvalidInputError(f"topk is {topk}, needs 1 to {most}.")


def _empty_choice(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized weights and ids."""
    shape, device = (len(logits), topk), logits.device
    return workspace.empty(shape, torch.float32, device), workspace.empty(shape, torch.int32, device)


@prepares("choose_experts")
def prepared_choice(
    device: Device, tokens: int, experts: int, topk: int, logits_bf16: bool, renormalize: bool
) -> Prepared:
    """What launches `choose_experts`, given the addresses of logits, padding (0 for none), weights and ids."""
    return device.prepare([choose_experts_launch(tokens, experts, topk, logits_bf16, renormalize)])


@prepares("routed_moe")
def prepared_routed_layer(
    device: Device, step: StepPlan | TritonStepPlan, logits_bf16: bool, renormalize: bool
) -> Prepared:
    """What launches `routed_moe`, given the addresses for `prepared_choice`, of the layer, its result and scratch."""
    hidden_states, w13, w13_scale, w2, w2_scale, out, scratch = map(Slot, range(4, 11))
    tensors = LayerAddresses(hidden_states, w13, w13_scale, w2, w2_scale, WEIGHTS, IDS, 0, out, scratch)
    first, *rest = layer_launches(device, tensors, step, Router(ids_64=False))
    if isinstance(step, SmallBatchStep):
        first = first._replace(early=True)
    sizes = step.tokens, step.shape.global_experts, step.shape.topk
    choice = choose_experts_launch(*sizes, logits_bf16, renormalize)
    return device.prepare([choice, first, *rest])


def choose_experts_launch(tokens: int, experts: int, topk: int, logits_bf16: bool, renormalize: bool) -> Launch:
    key = choose_experts_key()
    arguments = key.arguments(
        logits=LOGITS,
        padding=PADDING,
        weights=WEIGHTS,
        ids=IDS,
        logits_bf16=int(logits_bf16),
        tokens=tokens,
        experts=experts,
        topk=topk,
        renormalize=int(renormalize),
    )
    return Launch(key, ceil_div(tokens, key.threads // WARP), arguments, early=True)
