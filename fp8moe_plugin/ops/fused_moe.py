"""One mixture-of-experts layer: route, quantize, GEMM 1 with SiLU-and-mul, GEMM 2, combine; few tokens: small_batch."""

import functools
from typing import NamedTuple

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launcher import Launch, launch
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.ops.checks import check_apart, check_int, check_values, debugs, watch_rows
from fp8moe_plugin.ops.combine import combine, combine_launch
from fp8moe_plugin.ops.expert_checks import check_batched_call, check_layer_call
from fp8moe_plugin.ops.gate_up import gate_up
from fp8moe_plugin.ops.gemm_launch import (
    LayerAddresses,
    Rows,
    TileAddresses,
    Weights,
    gate_up_few_rows_launch,
    gate_up_launch,
    grouped_launch,
)
from fp8moe_plugin.ops.grouped_gemm import grouped_gemm
from fp8moe_plugin.ops.quantize import Quantized, empty_tokens, quantize_launch, quantize_rows, quantize_tokens
from fp8moe_plugin.ops.route import RoutingAddresses, route, route_launches, tiles_of_counts
from fp8moe_plugin.ops.small_batch import small_batch_launches
from fp8moe_plugin.ops.workspace import empty
from fp8moe_plugin.plan import (
    PREFILL_BLOCK_M,
    Layout,
    MoeScratch,
    gathers,
    keeps_b,
    layer_splits,
    moe_block_m,
    moe_scratch,
    moe_scratch_bytes,
    route_chunks,
    scale_rows,
    small_batch,
    starts_early,
    tile_counters,
)


class ExpertWeights(NamedTuple):
    """The values and the scales of a layer's two weights, as `fused_moe` takes them."""

    w13: Quantized
    w2: Quantized


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
        out: bfloat16 `[T, H]` to write to, or None. It may overlap with `hidden_states`, but with no other argument.
    Returns:
        bfloat16 `[T, H]`. Captures in a CUDA graph. A token's result does not depend on the other tokens of the call,
        but for their number, which decides of how many parts sums are made (`plan.k_splits`), and where these are few
        (`plan.small_batch`) for their experts, which decide of which parts. On a GPU with VLLM_BATCH_INVARIANT=1 it
        depends on neither.
    Raises:
        InvalidInputError: wrong dtype, shape, stride or device, too many experts, a tensor that requires a gradient;
            with FP8MOE_DEBUG=1 also an id below -1 or too large, or an `out` that overlaps with another argument.
        WrongResultError: with FP8MOE_DEBUG=1, a token of finite values has NaN in its result.
    """
    if activation != "silu":
        raise InvalidInputError(f"activation is {activation!r}, needs 'silu', the only one the kernels compute.")
    check_layer_call(hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, expert_map, out)
    check_values("topk_ids", topk_ids, -1, (w13.shape[0] if expert_map is None else expert_map.numel()) - 1)
    if out is None:
        out = torch.empty_like(hidden_states)
    if topk_ids.numel() == 0:
        return out.zero_()
    layer = _launch_fused_moe if uses_sm90(hidden_states) else _fused_moe
    weights = ExpertWeights((w13, w13_scale), (w2, w2_scale))
    args = (weights, topk_weights, topk_ids, expert_map, ue8m0, out)
    if not debugs(out.is_cuda):
        return layer(hidden_states, *args)
    read = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    check_apart("out", out, **read, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map)
    finite = hidden_states.isfinite().all(1) & topk_weights.isfinite().all(1)
    tokens = hidden_states.clone()  # `out`, which is poisoned first, may overlap with the original
    watch_rows(
        "fused_moe",
        out,
        finite,
        describe=lambda t: f"token {t} (experts {topk_ids[t].tolist()})",
        run=lambda: layer(tokens, *args),
    )
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
    if out is None:
        out = torch.empty(hidden_states.shape, dtype=torch.bfloat16, device=device)
    if max_m == 0:
        return out
    weights = ExpertWeights((w13, w13_scale), (w2, w2_scale))
    args = ((hidden_states, hidden_scale), weights, expert_num_tokens, expected_m, ue8m0, out)
    if not debugs(out.is_cuda):
        _batched_experts(*args)
        return out
    read = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale, "expert_num_tokens": expert_num_tokens}
    check_apart("out", out, hidden_states=hidden_states, hidden_scale=hidden_scale, **read)
    counted = torch.arange(max_m, device=device) < expert_num_tokens[:, None]
    finite = counted & (hidden_states.view(torch.uint8) & 0x7F != 0x7F).all(-1) & hidden_scale.isfinite().all(-1)
    describe = "row {1} of expert {0}".format
    watch_rows("batched_experts", out, finite, describe, lambda: _batched_experts(*args))
    return out


def _batched_experts(
    x: Quantized,
    weights: ExpertWeights,
    expert_num_tokens: torch.Tensor,
    expected_m: int,
    ue8m0: bool,
    out: torch.Tensor,
) -> None:
    """`batched_experts` of arguments that have been checked."""
    tiles = tiles_of_counts(expert_num_tokens, x[0].shape[1], PREFILL_BLOCK_M)
    tiles = tiles.for_experts(expected_m, weights.w2[0].shape[-1])
    inner = gate_up(x, weights.w13, tiles, expert_num_tokens, ue8m0)
    grouped_gemm(inner, weights.w2, out, tiles, after_gate_up=True)


def _fused_moe(
    hidden_states: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    ue8m0: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """The layer by the ops of its steps: in plain torch."""
    (tokens, topk), device = topk_ids.shape, hidden_states.device
    experts, hidden, intermediate = weights.w2[0].shape
    global_experts = experts if expert_map is None else expert_map.numel()
    block_m = moe_block_m(tokens, topk, global_experts)
    routing = route(topk_ids, experts, block_m, expert_map)
    tiles = routing.tiles.for_experts(tokens * topk / global_experts, intermediate)
    if gathers(intermediate, block_m):
        x = empty_tokens(tokens, hidden, device)
        quantize_tokens(hidden_states, x, ue8m0)
        inner = gate_up(x, weights.w13, tiles, routing.num_rows, ue8m0, routing.tokens)
    else:
        rows, scales = quantize_rows(hidden_states, routing.slots, ue8m0)
        inner = gate_up((rows[None], scales[None]), weights.w13, tiles, routing.num_rows, ue8m0)
    down = empty((tokens * topk, hidden), torch.bfloat16, device)
    grouped_gemm((inner[0][0], inner[1][0]), weights.w2, down, tiles)
    return combine(down, routing.slots, topk_weights, out)


def _launch_fused_moe(
    hidden_states: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    ue8m0: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """The layer on the GPU, whose steps hand each other addresses: to make a tensor takes as long as a launch."""
    (tokens, topk), device_index = topk_ids.shape, topk_ids.get_device()
    experts, hidden, intermediate = weights.w2[0].shape
    mapped = (0, experts) if expert_map is None else (expert_map.data_ptr(), expert_map.numel())
    sizes = (tokens, topk, hidden, intermediate, experts, mapped[1])
    scratch = empty((moe_scratch_bytes(*sizes),), torch.uint8, hidden_states.device)  # freed behind the last launch
    addresses = LayerAddresses(
        hidden_states.data_ptr(),
        weights.w13[0].data_ptr(),
        weights.w13[1].data_ptr(),
        weights.w2[0].data_ptr(),
        weights.w2[1].data_ptr(),
        topk_weights.data_ptr(),
        topk_ids.data_ptr(),
        mapped[0],
        out.data_ptr(),
        scratch.data_ptr(),
    )
    for each in _layer_launches(addresses, sizes, topk_ids.dtype == torch.int64, ue8m0, device_index):
        launch(*each)
    return out


@functools.lru_cache(maxsize=1024)
def _layer_launches(
    tensors: LayerAddresses, sizes: tuple[int, int, int, int, int, int], ids_64: bool, ue8m0: bool, device_index: int
) -> tuple[Launch, ...]:
    """The kernels of a layer, kept because torch gives steps of one length the same few addresses again and again.

    Args:
        sizes: those of `moe_scratch`.
    """
    tokens, topk, hidden, intermediate, experts, global_experts = sizes
    if width := small_batch(*sizes):
        return small_batch_launches(tensors, sizes, width, ids_64, ue8m0, device_index)
    block_m, offsets = moe_block_m(tokens, topk, global_experts), moe_scratch(*sizes)
    at = MoeScratch(*(tensors.scratch + offset for offset in offsets))
    w13 = Weights(tensors.w13, experts, 2 * intermediate, hidden, tensors.w13_scale)
    w2 = Weights(tensors.w2, experts, hidden, intermediate, tensors.w2_scale)
    rows, scales = tokens * topk, scale_rows(tokens * topk)
    inner = Rows(at.inner, rows, intermediate, at.inner_scales, 0, scales)
    splits = layer_splits(rows, experts, hidden, intermediate, block_m)
    layer = (rows / global_experts, intermediate, block_m)
    counted = starts_early(*layer) or block_m != PREFILL_BLOCK_M
    tiles = TileAddresses(at.table, at.num_tiles, at.ready if counted else 0, keeps_b(*layer))

    ids = (tensors.topk_ids, tensors.expert_map, at.expert_counts if route_chunks(rows) > 1 else 0)
    routing = RoutingAddresses(at.slots, at.tokens, at.num_rows, at.table, at.num_tiles, at.ready)
    counts = (rows, topk, global_experts, experts, block_m, tile_counters(intermediate, splits))
    launches = route_launches(ids, routing, ids_64, counts, device_index)
    quantized = (tensors.hidden_states, at.x, at.x_scales)
    if gathers(intermediate, block_m):
        x = Rows(at.x, tokens, hidden, at.x_scales, 0, 0)
        launches.append(quantize_launch(quantized, tokens, hidden, Layout.ROW_MAJOR, ue8m0, device_index))
        if block_m == PREFILL_BLOCK_M:
            launches.append(gate_up_launch(x, at.tokens, w13, inner, tiles, ue8m0, device_index))
        else:
            split = (at.partial, splits)
            first = gate_up_few_rows_launch(x, at.tokens, w13, inner, tiles, split, ue8m0, device_index, early=True)
            launches.append(first)
    else:
        x = Rows(at.x, rows, hidden, at.x_scales, 0, scales)
        slots = (at.slots, topk)
        launches.append(quantize_launch(quantized, tokens, hidden, Layout.PERMUTED, ue8m0, device_index, *slots))
        launches.append(gate_up_launch(x, 0, w13, inner, tiles, ue8m0, device_index))
    per_tile = tile_counters(intermediate, splits) if block_m != PREFILL_BLOCK_M else 0
    launches.append(grouped_launch(inner, w2, at.down, block_m, tiles, device_index, True, per_tile))
    combined = (at.down, at.slots, tensors.topk_weights, tensors.out)
    few_blocks = block_m != PREFILL_BLOCK_M  # many would each wait, and take longer than to start later
    return (*launches, combine_launch(combined, tokens, topk, hidden, device_index, few_blocks))
