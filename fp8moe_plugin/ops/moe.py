"""The mixture-of-experts ops: check a call, plan its step, and launch the kernels or run the reference."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.ops import backend, reference, workspace
from fp8moe_plugin.ops.backend import Device, prepares
from fp8moe_plugin.ops.checks import check_apart, check_values, debugs, watch_rows
from fp8moe_plugin.ops.expert_checks import LayerFacts, check_batched_call, check_layer_call, check_router
from fp8moe_plugin.ops.moe_launches import batched_launches, layer_launches
from fp8moe_plugin.ops.operands import (
    LAYER_SLOTS,
    ExpertWeights,
    LayerTensors,
    Quantized,
    Router,
    Rows,
    Weights,
    k_major,
)
from fp8moe_plugin.ops.option_checks import check_flag, check_int
from fp8moe_plugin.plan import BatchedPlan, MoeShape, StepPlan, plan_batched, plan_step
from fp8moe_plugin.plan.triton_catalog import is_triton
from fp8moe_plugin.plan.triton_step import TritonBatched, TritonStepPlan, plan_triton_batched, plan_triton_step


def fused_moe(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    activation: str = "silu",
    ue8m0: bool = False,
    shared_expert: bool = False,
    routed_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `w2[e] @ (silu(gate) * up)` with `gate, up = w13[e] @ token`.

    Args:
        hidden_states: bfloat16 `[T, H]`; H a multiple of 128.
        w13: e4m3 `[E, 2I, H]`, gate rows first; I a multiple of 128, E at most 1024.
        w13_scale: float32 `[E, 2I/128, H/128]`.
        w2: e4m3 `[E, H, I]`.
        w2_scale: float32 `[E, H/128, I/128]`.
        topk_weights: float32 `[T, k]`.
        topk_ids: int32 or int64 `[T, k]`; an id out of range (-1) contributes nothing.
        expert_map: int32 `[global experts]` giving the local expert or -1, or None. It is not empty; ids beyond its end
            are out of range.
        activation: "silu".
        ue8m0: round the scales of activations up to powers of two, for checkpoints with `scale_fmt: ue8m0`.
        shared_expert: every token also has the last expert with weight 1, which has no column in `topk_ids`; not with
            an `expert_map`.
        routed_scale: multiplies `topk_weights`.
        out: bfloat16 `[T, H]` to write to, or None. It may overlap with `hidden_states`, but with no other argument.
    Returns:
        bfloat16 `[T, H]`. Captures in a CUDA graph. A token's result does not depend on the values of other tokens. Its
        low-order bits may depend on how many there are, as K may be split, and in a small batch on their experts. On a
        GPU with VLLM_BATCH_INVARIANT=1 they depend on neither.
    Raises:
        InvalidInputError: wrong dtype, shape, stride, device or option, too many experts, a tensor that requires a
            gradient; with FP8MOE_DEBUG=1 also an id below -1 or too large, or an `out` that overlaps with another one.
        WrongResultError: with FP8MOE_DEBUG=1, a token of finite values has NaN in its result.
    """
    if activation != "silu":
        raise InvalidInputError(f"activation is {activation!r}, needs 'silu', the only one the kernels compute.")
    facts, addresses = check_layer_call(
        hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, expert_map, out
    )
    check_flag("ue8m0", ue8m0)
    if shared_expert is not False or type(routed_scale) is not float or routed_scale != 1.0:
        check_router(shared_expert, routed_scale, expert_map)
    if out is None:
        out = torch.empty_like(hidden_states)
        addresses = *addresses[:-1], out.data_ptr()
    if not facts.tokens or not (facts.shape.topk or shared_expert):
        return out.zero_()
    tensors = hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, expert_map, out
    layer = _watched_layer if debugs(out.is_cuda) else _layer
    layer(tensors, addresses, facts, ue8m0, shared_expert, routed_scale)
    return out


def _layer(
    tensors: LayerTensors,
    addresses: tuple[int, ...],
    facts: LayerFacts,
    ue8m0: bool,
    shared_expert: bool,
    routed_scale: float,
) -> None:
    """`fused_moe` of arguments that have been checked, with their addresses."""
    device = backend.device_of(tensors[0])
    if device is None:
        x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, expert_map, out = tensors
        weights = ExpertWeights((w13, w13_scale), (w2, w2_scale))
        router = Router(facts.ids_64, shared_expert, routed_scale)
        reference.fused_moe(x, weights, topk_weights, topk_ids, expert_map, ue8m0, router, out)
        return
    shape = facts.shape_with_shared_expert if shared_expert else facts.shape
    step = plan_layer(device, shape, facts.tokens, ue8m0)
    run = prepared_layer(device, step, facts.ids_64, facts.mapped, shared_expert, routed_scale)
    scratch = workspace.scratch(step.scratch.nbytes, tensors[0])
    run((*addresses, scratch.data_ptr()))  # LayerAddresses


def plan_layer(device: Device, shape: MoeShape, tokens: int, ue8m0: bool) -> StepPlan | TritonStepPlan:
    """The plan of a step for the kernels of a device."""
    if is_triton(device.target):
        return plan_triton_step(device.target, shape, tokens, ue8m0)
    return plan_step(shape, tokens, ue8m0, device.multiprocessors)


@prepares("fused_moe")
def prepared_layer(
    device: Device,
    step: StepPlan | TritonStepPlan,
    ids_64: bool,
    mapped: bool,
    shared_expert: bool = False,
    routed_scale: float = 1.0,
) -> Prepared:
    """What launches `fused_moe`, given its `LayerAddresses`; `mapped`: there is an expert map."""
    tensors = LAYER_SLOTS if mapped else LAYER_SLOTS._replace(expert_map=0)
    return device.prepare(layer_launches(device, tensors, step, Router(ids_64, shared_expert, routed_scale)))


def _watched_layer(
    tensors: LayerTensors,
    addresses: tuple[int, ...],
    facts: LayerFacts,
    ue8m0: bool,
    shared_expert: bool,
    routed_scale: float,
) -> None:
    """`_layer` that checks the ids, and raises `WrongResultError` for a token of finite values whose result is NaN."""
    x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, expert_map, out = tensors
    check_values("topk_ids", topk_ids, -1, facts.shape.global_experts - shared_expert - 1)
    read = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    check_apart("out", out, **read, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map)
    tokens = x.clone()  # `out`, which is poisoned first, may overlap with the original
    copied, at = (tokens, *tensors[1:]), (tokens.data_ptr(), *addresses[1:])
    watch_rows(
        "fused_moe",
        out,
        x.isfinite().all(1) & topk_weights.isfinite().all(1),
        describe=lambda t: f"token {t} (experts {topk_ids[t].tolist()})",
        run=lambda: _layer(copied, at, facts, ue8m0, shared_expert, routed_scale),
    )


def batched_experts(
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    *,
    expected_m: int,
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts alone, on tokens that an all-to-all has already quantized and sorted (DeepEP low latency).

    Args:
        hidden_states: e4m3 `[E, max_m, H]`; the first `expert_num_tokens[e]` rows of expert e are valid.
        hidden_scale: float32 `[E, max_m, H/128]` of any strides.
        w13, w13_scale, w2, w2_scale: as for `fused_moe`.
        expert_num_tokens: int32 `[E]` on the device.
        expected_m: rows per expert on average; may change the speed, never the result.
        ue8m0: as for `fused_moe`.
        out: bfloat16 `[E, max_m, H]` to write to, or None; rows past the count are not written. It must not share
            memory with the other arguments, which may still be read while it is written.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, a tensor that requires a gradient; with FP8MOE_DEBUG=1
            also a count out of range, or an `out` that overlaps with another argument.
        WrongResultError: with FP8MOE_DEBUG=1, a row of finite values has NaN in its result.
    """
    check_batched_call(hidden_states, hidden_scale, w13, w13_scale, w2, w2_scale, expert_num_tokens, out)
    max_m, device = hidden_states.shape[1], hidden_states.device
    check_values("expert_num_tokens", expert_num_tokens, 0, max_m)
    check_int("expected_m", expected_m)
    check_flag("ue8m0", ue8m0)
    if out is None:
        out = torch.empty(hidden_states.shape, dtype=torch.bfloat16, device=device)
    if max_m == 0:
        return out
    weights = ExpertWeights((w13, w13_scale), (w2, w2_scale))
    args = ((hidden_states, hidden_scale), weights, expert_num_tokens, expected_m, ue8m0, out)
    if debugs(out.is_cuda):
        _watched_experts(*args)
    else:
        _experts(*args)
    return out


def _experts(
    x: Quantized, weights: ExpertWeights, counts: torch.Tensor, expected_m: int, ue8m0: bool, out: torch.Tensor
) -> None:
    """`batched_experts` of arguments that have been checked."""
    device = backend.device_of(out)
    if device is None:
        reference.batched_experts(x, weights, counts, ue8m0, out)
        return
    (experts, max_m, hidden), intermediate = x[0].shape, weights.w2[0].shape[-1]
    shape = (experts, max_m, intermediate, expected_m, ue8m0)
    plan = plan_triton_batched(device.target, *shape) if is_triton(device.target) else plan_batched(*shape)
    scales, *strides = k_major(*x)
    run = prepared_batched(device, plan, experts, max_m, hidden, intermediate, *strides)
    scratch = workspace.scratch(plan.scratch.nbytes, out)
    tensors = x[0], scales, *weights.w13, *weights.w2, counts, out, scratch
    run(tuple(tensor.data_ptr() for tensor in tensors))


@prepares("batched_experts")
def prepared_batched(
    device: Device,
    plan: BatchedPlan | TritonBatched,
    experts: int,
    max_m: int,
    hidden: int,
    intermediate: int,
    scale_group: int,
    scale_k_block: int,
) -> Prepared:
    """What launches `batched_experts`, given the addresses in `_experts`; strides are those of `k_major`."""
    x, x_scales, w13, w13_scale, w2, w2_scale, counts, out, scratch = map(Slot, range(9))
    rows = Rows(x, experts * max_m, hidden, x_scales, scale_group, scale_k_block)
    first = Weights(w13, experts, 2 * intermediate, hidden, w13_scale)
    second = Weights(w2, experts, hidden, intermediate, w2_scale)
    return device.prepare(batched_launches(device, plan, rows, first, second, counts, out, scratch))


def _watched_experts(
    x: Quantized, weights: ExpertWeights, counts: torch.Tensor, expected_m: int, ue8m0: bool, out: torch.Tensor
) -> None:
    """`_experts` that raises `WrongResultError` for a row of finite values whose result is NaN."""
    (q, scales), (w13, w2) = x, weights
    read = {"hidden_states": q, "hidden_scale": scales, "w13": w13[0], "w13_scale": w13[1]}
    check_apart("out", out, **read, w2=w2[0], w2_scale=w2[1], expert_num_tokens=counts)
    counted = torch.arange(q.shape[1], device=out.device) < counts[:, None]
    watch_rows(
        "batched_experts",
        out,
        counted & (q.view(torch.uint8) & 0x7F != 0x7F).all(-1) & scales.isfinite().all(-1),
        describe="row {1} of expert {0}".format,
        run=lambda: _experts(x, weights, counts, expected_m, ue8m0, out),
    )
