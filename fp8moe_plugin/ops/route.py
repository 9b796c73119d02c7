"""Order rows by expert and cut them into tiles, on the device: nothing here waits for the GPU."""

from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import N_MULTIPLE
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.ops.backend import Device
from fp8moe_plugin.ops.operands import Tiles
from fp8moe_plugin.plan.catalog import (
    count_experts_key,
    route_key,
    tiles_of_counts_key,
    tiles_of_ends_key,
    tiles_of_indices_key,
)
from fp8moe_plugin.plan.shape import MoeShape
from fp8moe_plugin.plan.tiles import route_chunks


class Ids(NamedTuple):
    """The experts that tokens pick, int32 or int64 `[T, topk - shared_expert]`, and what maps them to local experts."""

    ids: Address
    ids_64: bool
    expert_map: Address  # int32 [global experts]: the local expert, or -1; 0: ids are local
    shared_expert: bool = False  # every token also has the last expert, which has no column in ids


class Routing(NamedTuple):
    """Where each (token, expert) pair goes."""

    slots: Address  # int32 [T, topk]: its row, -1 for none
    tokens: Address  # int32 [T * topk]: the token of each of the first num_rows rows
    num_rows: Address  # int32 [1]


def route_launches(
    ids: Ids,
    shape: MoeShape,
    tokens: int,
    counts: Address,
    out: Routing,
    tiles: Tiles,
    tile_rows: int,
    row_counters: int,
) -> list[Launch]:
    """Give each pair a row so that the rows of an expert are consecutive, in the order of the tokens.

    An id out of range (-1) gets no row.

    Args:
        counts: uint32 `[chunks, ceil(local experts / 2)]`, unused for a single chunk of pairs.
        tile_rows: rows of a tile, 64 or 128.
        row_counters: counters of each row tile in `tiles.done_counters`.
    """
    pairs = tokens * shape.topk
    chunks, key = route_chunks(pairs), route_key()
    routing = Launch(
        key,
        chunks,
        key.arguments(
            ids=ids.ids,
            expert_map=ids.expert_map,
            counts=counts if chunks > 1 else 0,
            slots=out.slots,
            tokens=out.tokens,
            num_rows=out.num_rows,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            done_counters=tiles.done_counters,
            ids_64=int(ids.ids_64),
            shared=int(ids.shared_expert),
            pairs=pairs,
            topk=shape.topk,
            global_experts=shape.global_experts - ids.shared_expert,
            num_experts=shape.local_experts,
            block_m=tile_rows,
            counters_per_tile=row_counters,
        ),
        early=True,
    )
    return [count_experts_launch(ids, shape, pairs, counts), routing] if chunks > 1 else [routing]


def count_experts_launch(ids: Ids, shape: MoeShape, pairs: int, counts: Address) -> Launch:
    """The pairs of each expert in each chunk of pairs, to `counts` as `route_launches` describes it."""
    key = count_experts_key()
    return Launch(
        key,
        route_chunks(pairs),
        key.arguments(
            ids=ids.ids,
            expert_map=ids.expert_map,
            counts=counts,
            ids_64=int(ids.ids_64),
            shared=int(ids.shared_expert),
            pairs=pairs,
            topk=shape.topk,
            global_experts=shape.global_experts - ids.shared_expert,
            num_experts=shape.local_experts,
        ),
    )


def tiles_of_counts_launch(counts: Address, groups: int, max_m: int, out: Tiles, tile_rows: int) -> Launch:
    """Tiles of `[groups, max_m]` rows, the first `counts[g]` of each group.

    `counts` is the address of int32 `[groups]`, which are clamped to `[0, max_m]`.
    """
    key = tiles_of_counts_key()
    return Launch(
        key,
        1,
        key.arguments(
            counts=counts,
            table=out.table,
            num_tiles=out.num_tiles,
            done_counters=out.done_counters,
            groups=groups,
            max_m=max_m,
            block_m=tile_rows,
        ),
        early=True,
    )


def tiles_of_ends_launch(ends: Address, groups: int, rows: int, alignment: int, out: Tiles, tile_rows: int) -> Launch:
    """Tiles of `rows` rows; those of group g end at `ends[g]`.

    `ends` is the address of int32 `[groups]`; a group begins at the next multiple of `alignment`.
    """
    key = tiles_of_ends_key()
    return Launch(
        key,
        1,
        key.arguments(
            ends=ends,
            table=out.table,
            num_tiles=out.num_tiles,
            done_counters=out.done_counters,
            groups=groups,
            rows=rows,
            alignment=alignment,
            block_m=tile_rows,
        ),
        early=True,
    )


def tiles_of_indices_launch(
    device: Device,
    indices: Address,
    rows: int,
    groups: int,
    run_begins: Address,
    out: Tiles,
    tile_rows: int,
    d: Address,
    n: int,
) -> Launch:
    """Tiles of the runs of equal ids in int32 `[rows]` at `indices`; ids outside `[0, groups)` make no tile.

    The rows of such ids in bfloat16 `[rows, n]` at `d` become zeros. `run_begins` is the address of int32 `[rows]`
    scratch.
    """
    key = tiles_of_indices_key()
    return Launch(
        key,
        max(2, device.multiprocessors),
        key.arguments(
            ids=indices,
            run_begins=run_begins,
            table=out.table,
            num_tiles=out.num_tiles,
            d=d,
            rows=rows,
            num_groups=groups,
            block_m=tile_rows,
            chunks=n // N_MULTIPLE,
        ),
        early=True,
    )
