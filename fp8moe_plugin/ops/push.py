"""A mixture-of-experts layer under expert parallelism, with its all-to-all: see `plan/sm90/push.py`."""

from typing import Any

import torch

from fp8moe_plugin.errors import InvalidInputError, UnsupportedError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.operands import LAYER_SLOTS
from fp8moe_plugin.launches.sm90.push import push_launches
from fp8moe_plugin.ops import devices, workspace
from fp8moe_plugin.ops.checks import check_tensor
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.expert_checks import LayerFacts, called_options, check_layer_call
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.ops.window import Window
from fp8moe_plugin.plan.options import LayerOptions
from fp8moe_plugin.plan.sm90.push import PushStep, WindowLayout, largest_share, plan_push
from fp8moe_plugin.settings import batch_invariant


def push_moe(
    window: Window,
    owners: torch.Tensor,
    rows: int,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    weights: WeightFormat = FP8_BLOCK,
    activation: str | Activation = "silu",
    ue8m0: bool = False,
    routed_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer of `fused_moe` for this rank's tokens, with the experts of all ranks of a group.

    Every rank of the group makes the call, with its own tokens, in the same order among all calls with this window. A
    rank without tokens makes it, too. A rank that does not come ends the work of the others with an error.

    Args:
        window: of this rank, see `open_window`.
        owners: int32 `[global experts]`, the rank that has each expert; on every rank the same.
        rows: most tokens of a rank in this step, at most `window.rows`; on every rank the same.
        expert_map: int32 `[global experts]`, the local expert or -1: an expert is on the rank that `owners` names.
            No rank has more than its share of the experts, rounded up.
        hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, w13_bias, w2_bias, weights, activation,
        ue8m0, routed_scale, out: as for `fused_moe`, of this rank. H, k and the number of experts are the window's.
    Returns:
        bfloat16 `[T, H]`: the sum of each rank's share, which is rounded to bfloat16, in float32 and in the order of
        the ranks; or the sum of `fused_moe` in steps that push rows (`pushes_rows` in plan/sm90/push.py). Captures in a
        CUDA graph; graphs of any number of rows may be replayed in any order, if all ranks replay the same. Only CUDA
        kernels compute it.
    Raises:
        InvalidInputError: as `fused_moe`; or the sizes do not match the window's.
        UnsupportedError: no SM90 kernels serve this device.
    """
    layer = w13, w13_scale, w2, w2_scale, w13_bias, w2_bias
    tensors = hidden_states, None, *layer, topk_weights, topk_ids, expert_map, out
    options = called_options(weights, activation, ue8m0, False, routed_scale)
    return run_push_moe(options, window, owners, rows, tensors)


def run_push_moe(
    options: LayerOptions, window: Window, owners: torch.Tensor, rows: int, tensors: tuple[Any, ...]
) -> torch.Tensor:
    """Run `push_moe` on its tensors, in the order of `LayerTensors`; `out` may be None."""
    facts, addresses = check_layer_call(options, batch_invariant())(*tensors)
    out: torch.Tensor = tensors[-1]
    if out is None:
        out = torch.empty_like(tensors[0])
        addresses = *addresses[:-1], out.data_ptr()
    _check_group(facts, window, owners, rows, out.device)
    device = devices.sm90_device_of(out)
    if device is None:
        raise UnsupportedError("push_moe has no reference: it needs the GPUs of a group. Call fused_moe.")
    step = plan_push(facts.spec, window.ranks, rows, device.multiprocessors, device.backend.tuning)
    run = prepared_push(device, step, window.layout, facts.tokens, facts.ids_64)
    scratch = workspace.scratch(step.scratch.nbytes, out)
    run((*addresses, scratch.data_ptr(), owners.data_ptr(), window.memory.data_ptr()))
    return out


def _check_group(facts: LayerFacts, window: Window, owners: torch.Tensor, rows: int, device: torch.device) -> None:
    topk, hidden, _, local, experts = facts.spec.shape
    if not facts.mapped:
        raise InvalidInputError("expert_map is None. Pass the local expert of each id, or -1.")
    check_tensor("owners", owners, dtype=torch.int32, shape=(experts,), device=device)
    check_int("rows", rows)
    if window.memory.device != device:
        raise InvalidInputError(
            f"The window is on {window.memory.device}, the tensors on {device}. Pass the window of this rank."
        )
    if local > (most := largest_share(experts, window.ranks)):
        raise InvalidInputError(
            f"This rank has {local} of {experts} experts, may have {most}: the {window.ranks} ranks need equal shares, "
            "up to one expert."
        )
    if (hidden, topk, experts) != (window.hidden, window.topk, window.experts):
        raise InvalidInputError(
            f"The window is for {window.hidden} channels and {window.topk} of {window.experts} experts per token, the "
            f"call has {hidden} and {topk} of {experts}. Open a window for each kind of layer."
        )
    if not max(facts.tokens, 1) <= rows <= window.rows:
        raise InvalidInputError(
            f"rows is {rows}, needs the largest number of tokens of a rank: from {max(facts.tokens, 1)}, those of this "
            f"one, to {window.rows}, for which the window was opened."
        )


@prepares("push_moe")
def prepared_push(device: Device, step: PushStep, layout: WindowLayout, tokens: int, ids_64: bool) -> Prepared:
    """Returns a callable that launches `push_moe`, given `LayerAddresses` and those of the owners and the window."""
    owners, window = (Slot(len(LAYER_SLOTS) + i) for i in range(2))
    return device.prepare(push_launches(step, LAYER_SLOTS, owners, window, layout, tokens, ids_64))
