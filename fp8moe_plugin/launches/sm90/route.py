"""The launches that sort (token, expert) pairs by expert, on the device."""

from typing import NamedTuple

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Ids
from fp8moe_plugin.launches.sm90.tiles import Tiles
from fp8moe_plugin.plan.sm90.catalog import count_experts_key, route_key
from fp8moe_plugin.plan.sm90.tiles import route_chunks


class Routing(NamedTuple):
    """The row of each (token, expert) pair."""

    slots: Address  # int32 [T, topk]: the row of each pair, -1 for none
    tokens: Address  # int32 [T * topk]: the token of each of the first num_rows rows; or its pair, with `numbers_pairs`
    num_rows: Address  # int32 [1]
    numbers_pairs: bool = False


def route_launches(ids: Ids, counts: Address, out: Routing, tiles: Tiles, cut: int, row_counters: int) -> list[Launch]:
    """Returns the launches that give each pair a row: the rows of an expert are consecutive, in the order of tokens.

    An id out of range (-1) gets no row.

    Args:
        counts: uint32 `[chunks, ceil(local experts / 2)]`, unused for a single chunk of pairs.
        cut: `RowTile.rows` of the tiles.
        row_counters: counters of each row tile in `tiles.done_counters`.
    """
    chunks, key = route_chunks(ids.pairs), route_key()
    routing = Launch(
        key,
        chunks,
        key.arguments(
            **ids.arguments() | ({"topk": 1} if out.numbers_pairs else {}),
            pairs=ids.pairs,
            counts=counts if chunks > 1 else 0,
            slots=out.slots,
            tokens=out.tokens,
            num_rows=out.num_rows,
            table=tiles.table,
            num_tiles=tiles.num_tiles,
            done_counters=tiles.done_counters,
            block_m=cut,
            counters_per_tile=row_counters,
        ),
        pdl=True,
    )
    return [count_experts_launch(ids, counts), routing] if chunks > 1 else [routing]


def count_experts_launch(ids: Ids, counts: Address) -> Launch:
    """Returns the launch that counts the pairs of each expert in each chunk; `counts`: see `route_launches`."""
    key = count_experts_key()
    return Launch(key, route_chunks(ids.pairs), key.arguments(**ids.arguments(), pairs=ids.pairs, counts=counts))
