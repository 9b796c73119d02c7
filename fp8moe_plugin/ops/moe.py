"""The mixture-of-experts ops: check a call, plan its step, and launch the kernels or run the reference."""

from typing import Any

import torch

from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.operands import LAYER_SLOTS, Rows, Weights
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.checks import check_apart, check_values, debugs, watch_rows
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.expert_checks import LayerFacts, called_options, check_batched_call, check_layer_call
from fp8moe_plugin.ops.operands import ExpertWeights, LayerTensors, Quantized, k_major, strided
from fp8moe_plugin.ops.option_checks import check_int
from fp8moe_plugin.ops.signature import addresses_of
from fp8moe_plugin.plan.options import LayerOptions
from fp8moe_plugin.plan.spec import LayerSpec
from fp8moe_plugin.settings import batch_invariant

LAYER = ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias")


def fused_moe(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    hidden_scale: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    weights: WeightFormat = FP8_BLOCK,
    activation: str | Activation = "silu",
    ue8m0: bool = False,
    shared_expert: bool = False,
    routed_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `w2[e] @ (silu(gate) * up)` with `gate, up = w13[e] @ token`.

    Args:
        hidden_states: bfloat16 `[T, H]`; H a multiple of 128. Or e4m3, with `hidden_scale`: tokens that were quantized
            before an all-to-all.
        w13: e4m3 `[E, 2I, H]`, gate rows first; I a multiple of 128, E at most 1024.
        w13_scale: float32 `[E, 2I/128, H/128]`.
        w2: e4m3 `[E, H, I]`.
        w2_scale: float32 `[E, H/128, I/128]`.
        topk_weights: float32 `[T, k]`; with `shared_expert` also `[T, k + 1]`.
        topk_ids: int32 or int64 `[T, k]`; an id out of range (-1) contributes nothing.
        hidden_scale: float32 `[T, H/128]` with e4m3 tokens, else None.
        w13_bias: float32 `[E, 2I]`, added to `w13[e] @ token` before the activation; or None.
        w2_bias: float32 `[E, H]`, added to the result of an expert before it is weighted. There are both or none.
        expert_map: int32 `[global experts]`, not empty: the local expert of each id, or -1; ids past its end are out
            of range. None: ids are local.
        weights: the format of the weights. `FP8_CHANNEL` (`formats/fp8_channel.py`) has one scale for each row:
            `w13_scale` is `[E, 2I, 1]`, and `w2_scale` `[E, H, 1]`. `ops/mxfp4.py` has the layouts of `PACKED_MXFP4`
            (`formats/mxfp4.py`).
        activation: "silu", or an `Activation` (`formats/activation.py`).
        ue8m0: round the scales of activations up to powers of two, for checkpoints with `scale_fmt: ue8m0`.
        shared_expert: the last expert processes every token, and has no column in `topk_ids`. Its weight is the last
            of k + 1 columns of `topk_weights`, or else 1. Cannot be combined with an `expert_map`.
        routed_scale: multiplies `topk_weights`; 1 if these have k + 1 columns.
        out: bfloat16 `[T, H]` to write to, or None. It may overlap with bfloat16 `hidden_states`, but with no other
            argument.
    Returns:
        bfloat16 `[T, H]`. Captures in a CUDA graph. A token's result does not depend on the values of other tokens. Its
        low-order bits may depend on the number of tokens, because K may be split and a small batch does not round rows
        to bfloat16 before it sums them; and in a small batch on the experts of other tokens. On a GPU with
        VLLM_BATCH_INVARIANT=1 they depend on neither.
    Raises:
        InvalidInputError: wrong dtype, shape, stride, device or option, too many experts, a tensor that requires a
            gradient; with FP8MOE_DEBUG=1 also an id below -1 or too large, or an `out` that overlaps with another one.
        WrongResultError: with FP8MOE_DEBUG=1, a token of finite values has NaN in its result.
    """
    layer = w13, w13_scale, w2, w2_scale, w13_bias, w2_bias
    tensors = hidden_states, hidden_scale, *layer, topk_weights, topk_ids, expert_map, out
    return run_fused_moe(called_options(weights, activation, ue8m0, shared_expert, routed_scale), tensors)


def run_fused_moe(options: LayerOptions, tensors: tuple[Any, ...]) -> torch.Tensor:
    """Run `fused_moe` on its tensors, in the order of `LayerTensors`; `out` may be None."""
    facts, addresses = check_layer_call(options, batch_invariant())(*tensors)
    out: torch.Tensor = tensors[-1]
    if out is None:
        out = torch.empty_like(tensors[0], dtype=torch.bfloat16)
        tensors, addresses = (*tensors[:-1], out), (*addresses[:-1], out.data_ptr())
    if not facts.tokens or not facts.spec.shape.topk:
        return out.zero_()
    layer = _watched_layer if debugs(out.is_cuda) else _layer
    layer(tensors, addresses, facts)
    return out


def _layer(tensors: LayerTensors, addresses: tuple[int, ...], facts: LayerFacts) -> None:
    """Run `fused_moe` on checked arguments, with their addresses."""
    device = devices.device_of(tensors[0])
    if device is None:
        x, x_scale, w13, w13_scale, w2, w2_scale, *biases, topk_weights, topk_ids, expert_map, out = tensors
        weights = ExpertWeights.of(w13, w13_scale, w2, w2_scale, *biases)
        reference.fused_moe(facts.spec, x, x_scale, weights, topk_weights, topk_ids, expert_map, out)
        return
    plan = device.backend.plan_layer(facts.spec, facts.tokens, device.multiprocessors)
    run = prepared_layer(device, plan, facts.ids_64, facts.mapped)
    scratch = workspace.scratch(plan.scratch, tensors[0])
    run((*addresses, scratch.data_ptr()))  # LayerAddresses


@prepares("fused_moe")
def prepared_layer(device: Device, plan: Plan, ids_64: bool, mapped: bool) -> Prepared:
    """Returns a callable that launches `fused_moe`, given its `LayerAddresses`; `mapped`: there is an expert map."""
    tensors = LAYER_SLOTS if mapped else LAYER_SLOTS._replace(expert_map=0)
    return device.prepare(plan.launches(tensors, ids_64))


def _watched_layer(tensors: LayerTensors, addresses: tuple[int, ...], facts: LayerFacts) -> None:
    """Run `_layer`, check the ids, and raise `WrongResultError` if a token of finite values has NaN in its result."""
    x, x_scale, *layer, topk_weights, topk_ids, expert_map, out = tensors
    check_values("topk_ids", topk_ids, -1, facts.spec.shape.global_experts - facts.spec.shared_expert - 1)
    read = dict(zip(LAYER, layer, strict=True))
    read |= {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
    check_apart("out", out, **read, **({} if x_scale is None else {"hidden_states": x, "hidden_scale": x_scale}))
    tokens = x.clone()  # `out`, which is poisoned first, may overlap with the original in bfloat16
    copied, at = (tokens, *tensors[1:]), (tokens.data_ptr(), *addresses[1:])
    watch_rows(
        "fused_moe",
        out,
        _finite_tokens(x, x_scale) & topk_weights.isfinite().all(1),
        describe=lambda t: f"token {t} (experts {topk_ids[t].tolist()})",
        run=lambda: _layer(copied, at, facts),
    )


def _finite_tokens(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Returns bool `[..]`: the tokens `[.., H]`, in bfloat16 or with scales in e4m3, without infinity and NaN."""
    if scales is None:
        return x.isfinite().all(-1)
    return (x.view(torch.uint8) & 0x7F != 0x7F).all(-1) & scales.isfinite().all(-1)


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
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    weights: WeightFormat = FP8_BLOCK,
    activation: str | Activation = "silu",
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run only the experts, on tokens that an all-to-all has quantized and sorted by expert (DeepEP low latency).

    Args:
        hidden_states: e4m3 `[E, max_m, H]`; the first `expert_num_tokens[e]` rows of expert e are valid.
        hidden_scale: float32 `[E, max_m, H/128]` of any strides.
        w13, w13_scale, w2, w2_scale: as for `fused_moe`.
        expert_num_tokens: int32 `[E]` on the device.
        expected_m: rows per expert on average; may change the speed, never the result.
        w13_bias, w2_bias, weights, activation, ue8m0: as for `fused_moe`.
        out: bfloat16 `[E, max_m, H]` to write to, or None; rows past the count are not written. It must not share
            memory with the other arguments, which may still be read while it is written.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, a tensor that requires a gradient; with FP8MOE_DEBUG=1
            also a count out of range, or an `out` that overlaps with another argument.
        WrongResultError: with FP8MOE_DEBUG=1, a row of finite values has NaN in its result.
    """
    layer = w13, w13_scale, w2, w2_scale, w13_bias, w2_bias
    tensors = hidden_states, hidden_scale, *layer, expert_num_tokens, out
    return run_batched_experts(called_options(weights, activation, ue8m0), expected_m, tensors)


def run_batched_experts(options: LayerOptions, expected_m: int, tensors: tuple[Any, ...]) -> torch.Tensor:
    """Run `batched_experts` on its tensors; `out`, the last, may be None."""
    facts, _ = check_batched_call(options, batch_invariant())(*tensors)
    x, x_scale, *layer, counts = tensors[:-1]
    out: torch.Tensor = tensors[-1]
    check_values("expert_num_tokens", counts, 0, facts.tokens)
    check_int("expected_m", expected_m)
    if out is None:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if not facts.tokens:
        return out
    args = (facts.spec, (x, x_scale), ExpertWeights.of(*layer), counts, expected_m, out)
    if debugs(out.is_cuda):
        _watched_experts(*args)
    else:
        _experts(*args)
    return out


def _experts(
    spec: LayerSpec, x: Quantized, weights: ExpertWeights, counts: torch.Tensor, expected_m: int, out: torch.Tensor
) -> None:
    """Run `batched_experts` on checked arguments."""
    device, max_m = devices.device_of(out), x[0].shape[1]
    if device is None:
        reference.batched_experts(spec, x, weights, counts, out)
        return
    plan = device.backend.plan_batched(spec, max_m, expected_m, device.multiprocessors)
    scales, *strides = strided(x[1]) if plan.any_scale_strides else k_major(*x)
    run = prepared_batched(device, plan, spec, max_m, *strides)
    scratch = workspace.scratch(plan.scratch, out)
    layer = *weights.w13, *weights.w2, *(weights.biases or (None, None))
    run(addresses_of((x[0], scales, *layer, counts, out, scratch)))


@prepares("batched_experts")
def prepared_batched(
    device: Device, plan: Plan, spec: LayerSpec, max_m: int, scale_group: int, scale_k_block: int, scale_row: int = 1
) -> Prepared:
    """Returns a callable that launches `batched_experts`, given addresses and what `k_major` or `strided` returns."""
    x, x_scales, *layer, counts, out, scratch = map(Slot, range(11))
    rows, hidden = spec.shape.local_experts * max_m, spec.shape.hidden
    operand = Rows(x, rows, hidden, x_scales, scale_group, scale_k_block, scale_row=scale_row)
    weights = Weights.of_experts(spec, *layer)
    return device.prepare(plan.launches(operand, *weights, counts, out, scratch))


def _watched_experts(
    spec: LayerSpec, x: Quantized, weights: ExpertWeights, counts: torch.Tensor, expected_m: int, out: torch.Tensor
) -> None:
    """Run `_experts`, and raise `WrongResultError` if a row of finite values has NaN in its result."""
    (q, scales), layer = x, (*weights.w13, *weights.w2, *(weights.biases or (None, None)))
    read = dict(zip(LAYER, layer, strict=True))
    check_apart("out", out, hidden_states=q, hidden_scale=scales, **read, expert_num_tokens=counts)
    counted = torch.arange(q.shape[1], device=out.device) < counts[:, None]
    watch_rows(
        "batched_experts",
        out,
        counted & _finite_tokens(q, scales),
        describe="row {1} of expert {0}".format,
        run=lambda: _experts(spec, x, weights, counts, expected_m, out),
    )
