"""Order rows by expert and cut them into tiles, on the device: nothing here waits for the GPU.

A tile table is int32 `[capacity, 4]`, one entry a row tile: `(expert, row_begin, row_end, first)`, where the rows are
those of the tile's whole expert and `first` is the index of that expert's first tile. Entry i is therefore tile
`i - first` of its expert, as `plan.row_tiles` cuts it. Only the first `num_tiles[0]` entries are written;
`num_tiles[1:5]` are two pairs of counters with which GEMMs hand the tiles out, zero before one and after it.

`ready` int32 `[1 + capacity * n]`, or None, is for a second GEMM of experts that starts while the first one ends: how
many of that one's blocks are done, then n counters of each row tile (`plan.tile_counters`), the first of which counts
the columns it has stored. In tiles of `PREFILL_BLOCK_M` each of two math warpgroups counts for itself. Making the
table zeroes it, so that it is good for one `gate_up`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fp8moe_plugin.checkpoint.shapes import ceil_div, too_many_experts
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launcher import Launch, launch
from fp8moe_plugin.ops import workspace
from fp8moe_plugin.ops.backend import uses_sm90
from fp8moe_plugin.plan import (
    count_experts_key,
    keeps_b,
    route_chunks,
    route_key,
    row_tiles,
    starts_early,
    tile_capacity,
    tiles_of_counts_key,
    tiles_of_indices_key,
)


@dataclass(frozen=True)
class Tiles:
    """Row tiles of `block_m` rows; see the module's docstring."""

    block_m: int
    table: torch.Tensor
    num_tiles: torch.Tensor
    ready: torch.Tensor | None = None
    keep_b: bool = False  # for GEMM 2; see plan.keeps_b

    def for_experts(self, rows_per_expert: float, intermediate: int) -> "Tiles":
        """The tiles for both GEMMs of experts; without `ready` where the second does not start early."""
        layer = (rows_per_expert, intermediate, self.block_m)
        return replace(self, ready=self.ready if starts_early(*layer) else None, keep_b=keeps_b(*layer))


@dataclass(frozen=True)
class Routing:
    """Where each (token, expert) pair goes.

    `slots` int32 `[T, k]` is its row (-1: nowhere); `tokens` int32 `[T * k]` the token of each of the `num_rows` rows,
    the rest of it undefined; `num_rows` int32 `[1]`.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    num_rows: torch.Tensor
    tiles: Tiles


class RoutingAddresses(NamedTuple):
    """Where `route_launches` write, in the order of the kernel's parameters; see `Routing` and `Tiles`."""

    slots: int
    tokens: int
    num_rows: int
    table: int
    num_tiles: int
    ready: int


def route(topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None = None) -> Routing:
    """Give each (token, expert) pair a row such that rows of one expert follow one another, in order of the tokens.

    Args:
        topk_ids: int32 or int64 `[T, k]`, global expert ids; an id out of range (-1) gets no row.
        num_experts: local experts, at most `MAX_LOCAL_EXPERTS`.
        block_m: rows a tile, 64 or 128.
        expert_map: int32 `[global experts]`, local expert or -1; None: global ids are local.
    Raises:
        InvalidInputError: too many local experts.
    """
    check_experts(num_experts)
    if not uses_sm90(topk_ids):
        return route_reference(topk_ids, num_experts, block_m, expert_map)
    rows, device = topk_ids.numel(), topk_ids.device
    routing = Routing(
        slots=workspace.empty(tuple(topk_ids.shape), torch.int32, device),
        tokens=workspace.empty((rows,), torch.int32, device),
        num_rows=workspace.empty((1,), torch.int32, device),
        tiles=_empty_tiles(rows, num_experts, block_m, device, ready=True),
    )
    tiles, chunks = routing.tiles, route_chunks(rows)
    counts = workspace.empty((chunks, ceil_div(num_experts, 2)), torch.int32, device) if chunks > 1 else None
    assert tiles.ready is not None
    results = (routing.slots, routing.tokens, routing.num_rows, tiles.table, tiles.num_tiles, tiles.ready)
    addresses = RoutingAddresses(*(result.data_ptr() for result in results))
    ids_64, topk = topk_ids.dtype == torch.int64, topk_ids.shape[1]
    mapped = (0, num_experts) if expert_map is None else (expert_map.data_ptr(), expert_map.numel())
    inputs = (topk_ids.data_ptr(), mapped[0], 0 if counts is None else counts.data_ptr())
    sizes = (rows, topk, mapped[1], num_experts, block_m, 1)
    for each in route_launches(inputs, addresses, ids_64, sizes, topk_ids.get_device()):
        launch(*each)
    return routing


def check_experts(num_experts: int) -> None:
    """Raise `InvalidInputError` unless `route` takes so many local experts."""
    if refusal := too_many_experts(num_experts):
        raise InvalidInputError(f"num_experts: {refusal}. Spread the experts over more GPUs (expert parallel).")


def tiles_of_counts(masked_m: torch.Tensor, max_m: int, block_m: int) -> Tiles:
    """Tiles of `[G, max_m]` rows of which the first `masked_m[g]` count; counts are clamped to `[0, max_m]`."""
    groups = masked_m.shape[0]
    if not uses_sm90(masked_m):
        counts = masked_m.clamp(0, max_m).tolist()
        groups_of_rows = [(g, g * max_m, g * max_m + c) for g, c in enumerate(counts)]
        return tiles_of_counts_reference(groups_of_rows, block_m, masked_m.device)
    tiles = _empty_tiles(groups * max_m, groups, block_m, masked_m.device, ready=True)
    _launch_tiles_of_counts(masked_m, max_m, tiles)
    return tiles


def tiles_of_indices(m_indices: torch.Tensor, num_groups: int, block_m: int) -> Tiles:
    """Tiles of the runs of equal ids in `m_indices`; ids outside `[0, num_groups)` make no tile."""
    if not uses_sm90(m_indices):
        return _tiles_reference(_runs(m_indices.tolist(), num_groups), block_m, m_indices.device)
    rows = m_indices.shape[0]
    tiles = _empty_tiles(rows, rows, block_m, m_indices.device, ready=False)
    _launch_tiles_of_indices(m_indices, num_groups, tiles)
    return tiles


def _empty_tiles(rows: int, groups: int, block_m: int, device: torch.device, ready: bool) -> Tiles:
    capacity = tile_capacity(rows, groups, block_m)
    table = workspace.empty((capacity, 4), torch.int32, device)
    counts = workspace.empty((1 + capacity,), torch.int32, device) if ready else None
    return Tiles(block_m, table, workspace.empty((5,), torch.int32, device), counts)


def route_reference(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None = None
) -> Routing:
    """Plain-torch twin of `route`."""
    ids = local_experts(topk_ids, num_experts, expert_map).flatten()
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    order = torch.sort(torch.where(ids < 0, num_experts, ids), stable=True).indices[: int(counts.sum())]
    slots = torch.full_like(ids, -1, dtype=torch.int32)
    slots[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    tokens = torch.zeros_like(slots)
    tokens[: order.numel()] = order // topk_ids.shape[1]
    ends = counts.cumsum(0).tolist()
    groups = [(e, end - count, end) for e, (end, count) in enumerate(zip(ends, counts.tolist(), strict=True))]
    num_rows = torch.tensor([order.numel()], dtype=torch.int32, device=ids.device)
    tiles = tiles_of_counts_reference(groups, block_m, ids.device)
    return Routing(slots.view(topk_ids.shape), tokens, num_rows, tiles)


def local_experts(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """int64 local expert of each pair, -1 where it is not here."""
    ids = topk_ids.long()
    limit = num_experts if expert_map is None else expert_map.numel()
    ids = torch.where((ids < 0) | (ids >= limit), -1, ids)
    if expert_map is not None:
        ids = torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0)])
    return torch.where(ids >= num_experts, -1, ids)


def tiles_of_counts_reference(groups: list[tuple[int, int, int]], block_m: int, device: torch.device) -> Tiles:
    """Tiles of `(expert, row_begin, row_end)` groups, those with tails first: the longest tiles are not the last."""
    in_order = sorted(groups, key=lambda group: max(row_tiles(group[2] - group[1], block_m), default=0) <= block_m)
    return _tiles_reference(in_order, block_m, device)


def _tiles_reference(groups: list[tuple[int, int, int]], block_m: int, device: torch.device) -> Tiles:
    """Tiles of `(expert, row_begin, row_end)` groups."""
    entries: list[tuple[int, int, int, int]] = []
    for expert, begin, end in groups:
        entries += [(expert, begin, end, len(entries))] * len(row_tiles(end - begin, block_m))
    table = torch.tensor(entries or [(0, 0, 0, 0)], dtype=torch.int32, device=device)
    return Tiles(block_m, table, torch.tensor([len(entries), 0, 0, 0, 0], dtype=torch.int32, device=device))


def _runs(ids: list[int], num_groups: int) -> list[tuple[int, int, int]]:
    runs, begin = [], 0
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[begin]:
            if 0 <= ids[begin] < num_groups:
                runs.append((ids[begin], begin, row))
            begin = row
    return runs


def route_launches(
    inputs: tuple[int, int, int],
    results: RoutingAddresses,
    ids_64: bool,
    sizes: tuple[int, int, int, int, int, int],
    device_index: int,
) -> list[Launch]:
    """The kernels of `route`.

    Args:
        inputs: addresses of ids, expert map (0: none) and int32 `[chunks, ceil(num_experts / 2)]`, the latter unused
            for one chunk.
        sizes: pairs, k, global and local experts, rows a tile, counters a tile in `results.ready`.
    """
    pairs, _, global_experts, num_experts, *_ = sizes
    chunks, launches = route_chunks(pairs), []
    if chunks > 1:
        counted = (*inputs, int(ids_64), pairs, global_experts, num_experts)
        launches.append(Launch(count_experts_key(), chunks, counted, device_index))
    args = (*inputs, *results, int(ids_64), *sizes)
    return [*launches, Launch(route_key(), chunks, args, device_index, early=chunks > 1)]


def _launch_tiles_of_counts(counts: torch.Tensor, max_m: int, tiles: Tiles) -> None:
    assert tiles.ready is not None
    addresses = (counts.data_ptr(), tiles.table.data_ptr(), tiles.num_tiles.data_ptr(), tiles.ready.data_ptr())
    args = (*addresses, counts.shape[0], max_m, tiles.block_m)
    launch(tiles_of_counts_key(), 1, args, counts.get_device())


def _launch_tiles_of_indices(m_indices: torch.Tensor, num_groups: int, tiles: Tiles) -> None:
    rows, device = m_indices.shape[0], m_indices.device
    run_begins = workspace.empty((rows,), torch.int32, device)
    addresses = (m_indices.data_ptr(), run_begins.data_ptr(), tiles.table.data_ptr(), tiles.num_tiles.data_ptr())
    launch(tiles_of_indices_key(), 1, (*addresses, rows, num_groups, tiles.block_m), m_indices.get_device())
