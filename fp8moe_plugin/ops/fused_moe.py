"""One mixture-of-experts layer: route, quantize, GEMM 1, SiLU-and-mul, GEMM 2, combine."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import (
    GROUP,
    check_activations,
    check_int,
    check_multiple,
    check_tensor,
    check_values,
    check_weights,
)
from fp8moe_plugin.ops.combine import combine
from fp8moe_plugin.ops.gemm import gemm_reference
from fp8moe_plugin.ops.grouped_gemm import launch_gemm
from fp8moe_plugin.ops.quantize import per_token_group_quant_fp8_reference, quantize_rows
from fp8moe_plugin.ops.route import local_experts, route, tiles_of_counts
from fp8moe_plugin.ops.silu_mul_quant import silu_mul_quant_fp8, silu_mul_quant_fp8_reference
from fp8moe_plugin.ops.workspace import empty
from fp8moe_plugin.plan import masked_block_m, moe_block_m


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `w2[e] @ (silu(gate) * up)` with `gate, up = w13[e] @ token`.

    Args:
        hidden_states: bfloat16 `[T, H]`; H a multiple of 128.
        w13: e4m3 `[E, 2I, H]`, gate rows first; I a multiple of 128.
        w13_scale: float32 `[E, 2I/128, H/128]`.
        w2: e4m3 `[E, H, I]`.
        w2_scale: float32 `[E, H/128, I/128]`.
        topk_weights: float32 `[T, k]`.
        topk_ids: int32 or int64 `[T, k]`; an id out of range (-1) contributes nothing.
        expert_map: int32 `[global experts]` giving the local expert or -1, or None.
        activation: "silu".
        ue8m0: round the scales of activations up to powers of two, for checkpoints with `scale_fmt: ue8m0`.
        out: bfloat16 `[T, H]` to write to, or None.
    Returns:
        bfloat16 `[T, H]`. Captures in a CUDA graph. A token's result does not depend on the other tokens of the call.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device; with FP8MOE_DEBUG=1 also an id below -1 or too large.
    """
    _check_layer(hidden_states, w13, w13_scale, w2, w2_scale, activation)
    tokens, device = hidden_states.shape[0], hidden_states.device
    check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(tokens, None), device=device)
    check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=tuple(topk_ids.shape), device=device)
    if expert_map is not None:
        check_tensor("expert_map", expert_map, dtype=torch.int32, shape=(None,), device=device)
    if out is None:
        out = torch.empty_like(hidden_states)
    check_tensor("out", out, dtype=torch.bfloat16, shape=tuple(hidden_states.shape), device=device)
    check_values("topk_ids", topk_ids, -1, (w13.shape[0] if expert_map is None else expert_map.numel()) - 1)
    if topk_ids.numel() == 0:
        return out.zero_()
    run = _fused_moe_sm90 if uses_sm90(hidden_states) else _fused_moe_reference
    run(hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, expert_map, ue8m0, out)
    return out


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
        hidden_states: e4m3 `[E, max_m, H]`, of which the first `expert_num_tokens[e]` rows count.
        hidden_scale: float32 `[E, max_m, H/128]` of any strides.
        w13, w13_scale, w2, w2_scale: as for `fused_moe`.
        expert_num_tokens: int32 `[E]` on the device.
        expected_m: rows an expert on average; may change the speed, never the result.
        ue8m0: as for `fused_moe`.
        out: bfloat16 `[E, max_m, H]` to write to, or None; rows past the count are not written.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device.
    """
    check_activations("hidden_states", (hidden_states, hidden_scale), dims=3)
    _check_weights_of_layer(hidden_states, w13, w13_scale, w2, w2_scale)
    check_tensor("hidden_states", hidden_states, dtype=hidden_states.dtype, shape=(w13.shape[0], None, None))
    experts, max_m, _ = hidden_states.shape
    device = hidden_states.device
    check_tensor("expert_num_tokens", expert_num_tokens, dtype=torch.int32, shape=(experts,), device=device)
    check_values("expert_num_tokens", expert_num_tokens, 0, max_m)
    check_int("expected_m", expected_m)
    if out is None:
        out = torch.empty(hidden_states.shape, dtype=torch.bfloat16, device=device)
    check_tensor("out", out, dtype=torch.bfloat16, shape=tuple(hidden_states.shape), device=device)
    if max_m == 0:
        return out
    if not uses_sm90(hidden_states):
        _batched_reference(hidden_states, hidden_scale, w13, w13_scale, w2, w2_scale, expert_num_tokens, ue8m0, out)
        return out
    tiles = tiles_of_counts(expert_num_tokens, max_m, masked_block_m(expected_m))
    gate_up = empty((experts, max_m, w13.shape[1]), torch.bfloat16, device)
    launch_gemm((hidden_states, hidden_scale), (w13, w13_scale), gate_up, None, tiles)
    launch_gemm(silu_mul_quant_fp8(gate_up, expert_num_tokens, ue8m0), (w2, w2_scale), out, None, tiles)
    return out


def _fused_moe_sm90(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    ue8m0: bool,
    out: torch.Tensor,
) -> None:
    (tokens, topk), device = topk_ids.shape, hidden_states.device
    experts, hidden = w13.shape[0], w13.shape[2]
    global_experts = experts if expert_map is None else expert_map.numel()
    routing = route(topk_ids, experts, moe_block_m(tokens, topk, global_experts), expert_map)
    rows = quantize_rows(hidden_states, routing.slots, ue8m0)
    gate_up = empty((1, tokens * topk, w13.shape[1]), torch.bfloat16, device)
    launch_gemm(rows, (w13, w13_scale), gate_up[0], None, routing.tiles)
    q, scales = silu_mul_quant_fp8(gate_up, routing.num_rows, ue8m0)
    down = empty((tokens * topk, hidden), torch.bfloat16, device)
    launch_gemm((q[0], scales[0]), (w2, w2_scale), down, None, routing.tiles)
    combine(down, routing.slots, topk_weights, out)


def _fused_moe_reference(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    ue8m0: bool,
    out: torch.Tensor,
) -> None:
    """The same arithmetic in plain torch, expert by expert: quantized operands, float32 sums, the same roundings."""
    ids = local_experts(topk_ids, w13.shape[0], expert_map)
    x, x_scales = per_token_group_quant_fp8_reference(hidden_states, ue8m0)
    rows = torch.zeros((*ids.shape, hidden_states.shape[1]), dtype=torch.bfloat16, device=ids.device)
    for expert in ids.unique().tolist():
        if expert >= 0:
            token, j = (ids == expert).nonzero(as_tuple=True)
            a = (x.view(torch.uint8)[token].view(x.dtype), x_scales[token])
            rows[token, j] = _expert_reference(a, w13[expert], w13_scale[expert], w2[expert], w2_scale[expert], ue8m0)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=ids.device)
    for j in range(ids.shape[1]):
        here = (ids[:, j] >= 0)[:, None]
        total += torch.where(here, topk_weights[:, j, None] * rows[:, j].float(), 0.0)
    out.copy_(total)


def _batched_reference(
    hidden_states: torch.Tensor,
    hidden_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    ue8m0: bool,
    out: torch.Tensor,
) -> None:
    for e, count in enumerate(expert_num_tokens.clamp(0, hidden_states.shape[1]).tolist()):
        a = (hidden_states[e, :count], hidden_scale[e, :count])
        out[e, :count] = _expert_reference(a, w13[e], w13_scale[e], w2[e], w2_scale[e], ue8m0)


def _expert_reference(
    a: tuple[torch.Tensor, torch.Tensor],
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ue8m0: bool,
) -> torch.Tensor:
    gate_up = gemm_reference(a, (w13, w13_scale)).to(torch.bfloat16)
    return gemm_reference(silu_mul_quant_fp8_reference(gate_up, ue8m0), (w2, w2_scale)).to(torch.bfloat16)


def _check_layer(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    activation: str,
) -> None:
    if activation != "silu":
        raise InvalidInputError(f"activation is {activation!r}, needs 'silu', the only one the kernels compute.")
    check_tensor("hidden_states", hidden_states, dtype=torch.bfloat16, shape=(None, None))
    check_multiple("hidden_states' H", hidden_states.shape[1], GROUP)
    _check_weights_of_layer(hidden_states, w13, w13_scale, w2, w2_scale)


def _check_weights_of_layer(
    hidden_states: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> None:
    hidden, device = hidden_states.shape[-1], hidden_states.device
    check_weights("w13", (w13, w13_scale), 3, hidden, device)
    check_multiple("w13's second dimension", w13.shape[1], 2 * GROUP)
    check_weights("w2", (w2, w2_scale), 3, w13.shape[1] // 2, device)
    check_tensor("w2", w2, dtype=w2.dtype, shape=(w13.shape[0], hidden, None))
