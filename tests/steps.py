"""The steps of a layer one by one, on tensors: each builds its launches as the layer does, and runs them.

Where no device serves a tensor, the steps that sort and quantize tokens do it in plain torch: what kernels are compared
with, bit by bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, GROUP
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.weight_format import WeightFormat, ceil_div
from fp8moe_plugin.jit.launch import Launch
from fp8moe_plugin.launches.operands import Ids, Rows, Weights
from fp8moe_plugin.launches.sm90.combine import combine_launch
from fp8moe_plugin.launches.sm90.gate_up import gate_up_few_rows_launch, gate_up_launch
from fp8moe_plugin.launches.sm90.gemm import (
    grouped_gemm_few_rows_launch,
    grouped_gemm_launch,
)
from fp8moe_plugin.launches.sm90.quantize import quantize_launch
from fp8moe_plugin.launches.sm90.route import Routing as RoutingAddresses
from fp8moe_plugin.launches.sm90.route import route_launches
from fp8moe_plugin.launches.sm90.tiles import Tiles as TileAddresses
from fp8moe_plugin.launches.sm90.tiles import tiles_of_counts_launch, tiles_of_ends_launch, tiles_of_indices_launch
from fp8moe_plugin.ops import devices, operands, reference, workspace
from fp8moe_plugin.ops.checks import FP8
from fp8moe_plugin.ops.devices import Device
from fp8moe_plugin.ops.operands import Quantized, empty_quantized, k_major, strided
from fp8moe_plugin.plan.gpu_tuning import UNTUNED
from fp8moe_plugin.plan.scratch import tile_capacity
from fp8moe_plugin.plan.sm90.catalog import gate_up_few_rows_key, gate_up_key, permute_key, quantize_key
from fp8moe_plugin.plan.sm90.constants import Layout
from fp8moe_plugin.plan.sm90.grouped import columns_at_once, down_uses_pdl, grouped_key, keeps_b
from fp8moe_plugin.plan.sm90.scratch import row_counters
from fp8moe_plugin.plan.sm90.tiles import RowTile, route_chunks, row_tiles
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape


def device_of(tensor: torch.Tensor) -> Device:
    device = devices.device_of(tensor)
    assert device is not None, "this step has no reference"
    return device


def launch(device: Device, launches: Iterable[Launch]) -> None:
    """Launch kernels of csrc whose addresses are known."""
    if not device.backend.has_all_ops:
        pytest.skip("Triton kernels serve this device")
    device.prepare(launches)(())


def rows_of(values: torch.Tensor, scales: operands.ScalesAndStrides) -> Rows:
    """Rows of `[.., k]` with scales from `k_major`, which must stay alive until the launch."""
    k = values.shape[-1]
    return Rows(values.data_ptr(), values.numel() // k, k, scales[0].data_ptr(), *scales[1:])


def format_of(weight: Quantized) -> WeightFormat:
    """Returns the format that has scales of this shape."""
    return FP8_CHANNEL if weight[1].shape[-2:] == (weight[0].shape[-2], 1) else FP8_BLOCK


def weights_of(weight: Quantized, bias: torch.Tensor | None = None) -> Weights:
    (*experts, n, k), added = weight[0].shape, 0 if bias is None else bias.data_ptr()
    return Weights(weight[0].data_ptr(), experts[0] if experts else 1, n, k, weight[1].data_ptr(), bias=added)


# ---- routing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileTensors:
    """Row tiles; see fp8moe_plugin/launches/sm90/tiles.py."""

    tile: RowTile
    table: torch.Tensor
    num_tiles: torch.Tensor
    done_counters: torch.Tensor | None = None
    keep_b: bool = False

    def for_experts(self, rows_per_expert: float, intermediate: int) -> "TileTensors":
        """Those of both GEMMs of experts for many rows; without `done_counters` where GEMM 2 does not start early."""
        pdl = down_uses_pdl(rows_per_expert, intermediate, UNTUNED)
        kept = keeps_b(rows_per_expert, intermediate, UNTUNED)
        return replace(self, done_counters=self.done_counters if pdl else None, keep_b=kept)

    @property
    def addresses(self) -> TileAddresses:
        counters = 0 if self.done_counters is None else self.done_counters.data_ptr()
        return TileAddresses(self.table.data_ptr(), self.num_tiles.data_ptr(), counters)


@dataclass(frozen=True)
class RoutingTensors:
    """Where each (token, expert) pair goes."""

    slots: torch.Tensor  # int32 [T, topk]: its row, -1 for none
    tokens: torch.Tensor  # int32 [T * topk]: the token of each of the first num_rows rows
    num_rows: torch.Tensor  # int32 [1]
    tiles: TileTensors


def empty_tiles(rows: int, groups: int, tile: RowTile, device: torch.device, counted: bool = True) -> TileTensors:
    capacity = tile_capacity(rows, groups, tile.rows)
    table = workspace.empty((capacity, 4), torch.int32, device)
    counters = workspace.empty((1 + capacity,), torch.int32, device) if counted else None
    return TileTensors(tile, table, workspace.empty((5,), torch.int32, device), counters)


def route(
    topk_ids: torch.Tensor, num_experts: int, tile: RowTile, expert_map: torch.Tensor | None = None
) -> RoutingTensors:
    """Rows for the pairs of int32 or int64 `[T, topk]` ids, and tiles of the rows."""
    device = devices.device_of(topk_ids)
    if device is None:
        return route_reference(topk_ids, num_experts, tile, expert_map)
    (tokens, topk), where = topk_ids.shape, topk_ids.device
    rows = tokens * topk
    slots = workspace.empty((tokens, topk), torch.int32, where)
    tokens_of_rows = workspace.empty((rows,), torch.int32, where)
    num_rows, tiles = workspace.empty((1,), torch.int32, where), empty_tiles(rows, num_experts, tile, where)
    counts = workspace.empty((route_chunks(rows), ceil_div(num_experts, 2)), torch.int32, where)
    mapped = (0, num_experts) if expert_map is None else (expert_map.data_ptr(), expert_map.numel())
    spec = LayerSpec(MoeShape(topk, GROUP, GROUP, num_experts, mapped[1]))
    ids = Ids(topk_ids.data_ptr(), topk_ids.dtype == torch.int64, mapped[0], tokens, spec)
    out = RoutingAddresses(slots.data_ptr(), tokens_of_rows.data_ptr(), num_rows.data_ptr())
    launch(device, route_launches(ids, counts.data_ptr(), out, tiles.addresses, tile.rows, 1))
    return RoutingTensors(slots, tokens_of_rows, num_rows, tiles)


def route_reference(
    topk_ids: torch.Tensor, num_experts: int, tile: RowTile, expert_map: torch.Tensor | None = None
) -> RoutingTensors:
    ids = reference.local_experts(topk_ids, num_experts, expert_map).flatten()
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    order = torch.sort(torch.where(ids < 0, num_experts, ids), stable=True).indices[: int(counts.sum())]
    slots = torch.full_like(ids, -1, dtype=torch.int32)
    slots[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    tokens = torch.zeros_like(slots)
    tokens[: order.numel()] = order // topk_ids.shape[1]
    ends = counts.cumsum(0).tolist()
    groups = [(e, end - count, end) for e, (end, count) in enumerate(zip(ends, counts.tolist(), strict=True))]
    num_rows = torch.tensor([order.numel()], dtype=torch.int32, device=ids.device)
    return RoutingTensors(slots.view(topk_ids.shape), tokens, num_rows, tiles_of_groups(groups, tile, ids.device))


def tiles_of_counts(counts: torch.Tensor, max_m: int, tile: RowTile) -> TileTensors:
    """Tiles of `[G, max_m]` rows, the first `counts[g]` of each group; counts are clamped to `[0, max_m]`."""
    device = devices.device_of(counts)
    if device is None:
        clamped = counts.clamp(0, max_m).tolist()
        groups = [(g, g * max_m, g * max_m + count) for g, count in enumerate(clamped)]
        return tiles_of_groups(groups, tile, counts.device)
    tiles = empty_tiles(len(counts) * max_m, len(counts), tile, counts.device)
    launch(device, [tiles_of_counts_launch(counts.data_ptr(), len(counts), max_m, tiles.addresses, tile.rows)])
    return tiles


def tiles_of_ends(ends: torch.Tensor, rows: int, alignment: int, tile: RowTile) -> TileTensors:
    """Tiles of `rows` rows; those of group g begin at a multiple of `alignment` and end at `ends[g]`."""
    device = devices.device_of(ends)
    if device is None:
        limits = [0, *ends.clamp(0, rows).tolist()]
        begins = [-(-limit // alignment) * alignment for limit in limits]
        groups = [(g, begins[g], max(begins[g], limits[g + 1])) for g in range(len(ends))]
        return tiles_of_groups(groups, tile, ends.device)
    tiles = empty_tiles(rows, len(ends), tile, ends.device)
    launch(device, [tiles_of_ends_launch(ends.data_ptr(), len(ends), rows, alignment, tiles.addresses, tile.rows)])
    return tiles


def tiles_of_indices(indices: torch.Tensor, num_groups: int, tile: RowTile, out: torch.Tensor) -> TileTensors:
    """Tiles of the runs of equal ids in int32 `[rows]`; ids outside `[0, num_groups)` make no tile.

    Their rows in `out`, bfloat16 `[rows, n]`, become zeros.
    """
    device, rows = devices.device_of(indices), len(indices)
    if device is None:
        out[(indices < 0) | (indices >= num_groups)] = 0
        return tiles_of_runs(indices, num_groups, tile)
    tiles, runs = empty_tiles(rows, rows, tile, indices.device, counted=False), torch.empty_like(indices)
    addresses = indices.data_ptr(), rows, num_groups, runs.data_ptr(), tiles.addresses
    result = out.data_ptr(), out.shape[1]
    launch(device, [tiles_of_indices_launch(device.multiprocessors, *addresses, tile.rows, *result)])
    return tiles


def tiles_of_runs(indices: torch.Tensor, num_groups: int, tile: RowTile) -> TileTensors:
    ids, begin = indices.tolist(), 0
    runs = []
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[begin]:
            if 0 <= ids[begin] < num_groups:
                runs.append((ids[begin], begin, row))
            begin = row
    return _table(runs, tile, indices.device)


def tiles_of_groups(groups: list[tuple[int, int, int]], tile: RowTile, device: torch.device) -> TileTensors:
    """Tiles of `(expert, row_begin, row_end)` groups, those with tails first: the longest tiles are not the last."""
    in_order = sorted(groups, key=lambda group: max(row_tiles(group[2] - group[1], tile), default=0) <= tile.rows)
    return _table(in_order, tile, device)


def _table(groups: list[tuple[int, int, int]], tile: RowTile, device: torch.device) -> TileTensors:
    entries: list[tuple[int, int, int, int]] = []
    for expert, begin, end in groups:
        entries += [(expert, begin, end, len(entries))] * len(row_tiles(end - begin, tile))
    table = torch.tensor(entries or [(0, 0, 0, 0)], dtype=torch.int32, device=device)
    return TileTensors(tile, table, torch.tensor([len(entries), 0, 0, 0, 0], dtype=torch.int32, device=device))


# ---- quantization and combination ----------------------------------------------------------------------------------


def quantize_rows(x: torch.Tensor, slots: torch.Tensor, ue8m0: bool = False) -> Quantized:
    """Each token of bfloat16 `[T, K]` quantized to the rows that `slots` names for it; K-major scales."""
    device, k = devices.device_of(x), x.shape[1]
    if device is None:
        return quantize_rows_reference(x, slots, ue8m0)
    q, scales = empty_quantized(slots.numel(), k, x.device)
    if x.numel():
        key, permuted = quantize_key(ue8m0, Layout.PERMUTED), {"slots": slots.data_ptr(), "topk": slots.shape[1]}
        addresses = x.data_ptr(), q.data_ptr(), scales.data_ptr()
        launch(device, [quantize_launch(key, *addresses, len(x), k, **permuted)])
    return q, scales


def copy_rows(tokens: Quantized, slots: torch.Tensor) -> Quantized:
    """Each token of e4m3 `[T, K]`, whose scales are contiguous, copied to the rows that `slots` names for it."""
    (x, x_scales), k = tokens, tokens[0].shape[1]
    q, scales = empty_quantized(slots.numel(), k, x.device)
    if x.numel():
        addresses = x.data_ptr(), q.data_ptr(), scales.data_ptr()
        rows = {"slots": slots.data_ptr(), "topk": slots.shape[1], "x_scales": x_scales.data_ptr()}
        launch(device_of(x), [quantize_launch(permute_key(), *addresses, len(x), k, **rows)])
    return q, scales


def quantize_rows_reference(x: torch.Tensor, slots: torch.Tensor, ue8m0: bool = False) -> Quantized:
    q, scales = empty_quantized(slots.numel(), x.shape[1], x.device)
    token_q, token_scales = reference.quantize(x, ue8m0)
    token, column = (slots >= 0).nonzero(as_tuple=True)
    rows = slots[token, column].long()
    q.view(torch.uint8)[rows] = token_q.view(torch.uint8)[token]
    scales[rows] = token_scales[token]
    return q, scales


def empty_tokens(tokens: int, k: int, device: torch.device) -> Quantized:
    """Room for `quantize_tokens`: e4m3 `[tokens, k]` and row-major scales."""
    q = workspace.empty((tokens, k), FP8, device)
    return q, workspace.empty((tokens, k // GROUP), torch.float32, device)


def quantize_tokens(x: torch.Tensor, out: Quantized, ue8m0: bool = False) -> None:
    """Quantize bfloat16 `[T, K]` for a GEMM that gathers its rows, while the launch before may still run."""
    device = devices.device_of(x)
    if device is None:
        reference.write(out, reference.quantize(x, ue8m0))
    elif x.numel():
        addresses, key = (x.data_ptr(), out[0].data_ptr(), out[1].data_ptr()), quantize_key(ue8m0, Layout.ROW_MAJOR)
        launch(device, [quantize_launch(key, *addresses, *x.shape, pdl=True)])


def combine(rows: torch.Tensor, slots: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of each token's rows."""
    device, (tokens, topk) = devices.device_of(rows), slots.shape
    if device is None:
        return reference.combine(rows[slots.clamp(min=0).long()], slots >= 0, topk_weights, out)
    if tokens:
        addresses = rows.data_ptr(), slots.data_ptr(), topk_weights.data_ptr(), out.data_ptr()
        launch(device, [combine_launch(*addresses, tokens=tokens, topk=topk, hidden=out.shape[1])])
    return out


# ---- GEMMs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitK:
    """Blocks of GEMM 1 for few rows that share a tile, and the memory in which they do."""

    splits: int
    partial: torch.Tensor  # float32 [splits, rows, 2I]
    counters: int  # of each row tile, in `done_counters` of its tiles


def split_k(splits: int, tiles: TileTensors, rows: int, intermediate: int) -> tuple[SplitK, TileTensors]:
    """Memory for splits of K, and the tiles with counters for them."""
    counters, device = row_counters(intermediate, splits), tiles.table.device
    partial = workspace.empty((splits, rows, 2 * intermediate), torch.float32, device)
    done_counters = torch.zeros(1 + len(tiles.table) * counters, dtype=torch.int32, device=device)
    return SplitK(splits, partial, counters), replace(tiles, done_counters=done_counters)


def gate_up(
    a: Quantized,
    w13: Quantized,
    tiles: TileTensors,
    *,
    ue8m0: bool = False,
    activation: Activation = SILU,
    tokens: torch.Tensor | None = None,
    split: SplitK | None = None,
    out: Quantized | None = None,
    bias: torch.Tensor | None = None,
) -> Quantized:
    """GEMM 1 of the experts with its activation, for rows that the tiles name.

    Args:
        a: `[G, max_m, H]`; with `tokens` `[T, H]` with row-major scales.
        tokens: int32 `[G, max_m]`, or `[max_m]` for one group: the row of `a` that each row is.
        split: of the kernel for few rows, which counts in `tiles.done_counters` only with it.
        out: e4m3 `[G * max_m, I]` and K-major scales to write to, or None.
        bias: float32 `[G, 2I]` or None.
    Returns:
        e4m3 `[G, max_m, I]` and its scales, K-major over all rows.
    """
    groups, max_m = a[0].shape[:2] if tokens is None else tokens.view(-1, tokens.shape[-1]).shape
    device, intermediate = device_of(w13[0]), w13[0].shape[1] // 2
    q, scales = out or empty_quantized(groups * max_m, intermediate, w13[0].device)
    inner = Rows.k_major(q.data_ptr(), scales.data_ptr(), groups * max_m, intermediate)
    weights, a_rows, at = weights_of(w13, bias), 0 if tokens is None else tokens.data_ptr(), tiles.addresses
    if a_rows:
        x = Rows.row_major(a[0].data_ptr(), a[1].data_ptr(), *a[0].shape)
    elif tiles.tile.streams_weights:
        kept, *strides, scale_row = strided(a[1])
        x = rows_of(a[0], (kept, *strides))._replace(scale_row=scale_row)
    else:
        kept, *strides = k_major(*a)  # which must stay alive until the launch
        x = rows_of(a[0], (kept, *strides))
    blocks = device.multiprocessors
    shape, numbers = MoeShape(1, a[0].shape[-1], intermediate, len(w13[0]), len(w13[0])), activation.numbers
    spec = LayerSpec(shape, format_of(w13), ue8m0, activation, bias is not None)
    if not tiles.tile.streams_weights:
        first = gate_up_key(spec, bool(a_rows))
        launch(device, [gate_up_launch(first, blocks, x, weights, inner, at, numbers, a_rows=a_rows)])
    else:
        shared, counted = {}, TileAddresses(at.table, at.num_tiles)
        if split:
            shared = {"partial": split.partial.data_ptr(), "k_splits": split.splits, "row_counters": split.counters}
            counted = at
        operands_of_few = x, weights, inner, counted, numbers
        key = gate_up_few_rows_key(spec)
        launch(device, [gate_up_few_rows_launch(key, blocks, *operands_of_few, a_rows=a_rows, **shared)])
    return q.view(groups, max_m, intermediate), scales.unflatten(0, (groups, max_m))


def grouped_gemm(
    a: Quantized,
    b: Quantized,
    out: torch.Tensor,
    tiles: TileTensors,
    *,
    after_gate_up: bool = False,
    row_counters: int = 0,
    bias: torch.Tensor | None = None,
) -> None:
    """`out[i] = a[i] @ b[expert of the tile].T` for rows that the tiles name; i over all groups.

    Args:
        after_gate_up: the launch before is the `gate_up` of the same tiles that makes `a`, and this one may start
            before that ends: where `tiles.done_counters`; for few rows always, and waits for rows only with
            `row_counters`.
        row_counters: for few rows the counters of each row tile in `tiles.done_counters`; 0: nothing has counted there.
        bias: float32 `[G, n]` or None, added to each row.
    """
    device, scales, weights = device_of(out), k_major(*a), weights_of(b, bias)
    rows, key = rows_of(a[0], scales), grouped_key(tiles.tile, tiles.keep_b, format_of(b), bias is not None)
    target, blocks = (out.data_ptr(), tiles.addresses), device.multiprocessors
    if tiles.tile.streams_weights:
        columns = columns_at_once(rows.rows, weights.experts, weights.n, weights.k)
        few = {"columns": columns, "row_counters": row_counters, "pdl": after_gate_up}
        launch(device, [grouped_gemm_few_rows_launch(key, blocks, rows, weights, *target, **few)])
    else:
        pdl = after_gate_up and tiles.done_counters is not None
        launch(device, [grouped_gemm_launch(key, blocks, rows, weights, *target, pdl=pdl)])
