"""Orders (token, expert) pairs by expert, and cuts the rows of experts into tiles.

A tile table is int32 `[capacity, 4]`, one entry `(expert, row_begin, row_end, unused)` for each tile; `num_tiles` is
int32 `[2]`, the number of tiles and of rows.
"""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel


@triton.jit
def local_experts(ids, expert_map, pair, pairs, topk, shared_expert, ids_64, mapped, routed_experts, num_experts):
    """The local expert of each pair, -1 for none.

    `ids` are int32 `[tokens, topk - shared_expert]`, or if `ids_64` is 1 the halves of int64. `mapped` is 1 if there is
    an expert map, else 0. If `shared_expert` is 1, the last pair of each token is with expert `routed_experts`.
    """
    token = pair // topk
    is_shared = pair - token * topk >= topk - shared_expert
    at = pair - token * shared_expert
    routed = (pair < pairs) & (is_shared == 0)
    low = tl.load(ids + at * (1 + ids_64), routed, -1)
    high = tl.load(ids + at * 2 + 1, routed & (pair < pairs * ids_64), 0)
    known = (low >= 0) & (low < routed_experts) & (high == 0)
    expert = tl.where(mapped != 0, tl.load(expert_map + low, known & (low < routed_experts * mapped), -1), low)
    expert = tl.where(known & (expert >= 0) & (expert < num_experts), expert, -1)
    return tl.where(is_shared & (pair < pairs), routed_experts, expert)


@triton.jit
def numbers(expert, CHUNK: tl.constexpr):
    """How many earlier ones of the CHUNK pairs have the same expert, for each pair."""
    pair = tl.arange(0, CHUNK)
    earlier = (expert[:, None] == expert[None, :]) & (pair[:, None] < pair[None, :])
    return tl.sum(earlier.to(tl.int32), 0)


@triton.jit
def count_experts(
    chunk,
    parts,
    ids,
    expert_map,
    counts,
    slots,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The pairs of each expert in a chunk of `parts * CHUNK` pairs, to int32 `counts` `[chunks, EXPERTS]`.

    To `slots` the number of each pair among those of its expert in the chunk.
    """
    counted = tl.zeros([EXPERTS], tl.int32)
    for part in range(parts):
        pair = (chunk * parts + part) * CHUNK + tl.arange(0, CHUNK)
        expert = local_experts(
            ids, expert_map, pair, pairs, topk, shared_expert, ids_64, mapped, routed_experts, num_experts
        )
        number = tl.gather(counted, tl.maximum(expert, 0), 0) + numbers(expert, CHUNK)
        tl.store(slots + pair, number, pair < pairs)
        counted += tl.histogram(tl.maximum(expert, 0), EXPERTS, mask=expert >= 0)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), counted)


@triton.jit
def place_rows(expert, row, pair, pairs, topk, slots, tokens):
    """The row of each pair to `slots`, -1 for none; the token of each row to `tokens`."""
    here = expert >= 0
    tl.store(slots + pair, tl.where(here, row, -1), pair < pairs)
    tl.store(tokens + row, pair // topk, here)


@triton.jit
def write_tile(table, tile, expert, begin, end, exists):
    entry = table + 4 * tile
    tl.store(entry, expert, exists)
    tl.store(entry + 1, begin, exists)
    tl.store(entry + 2, end, exists)


@triton.jit
def write_tiles(total, start, table, num_tiles, block_m, chunk, chunks, EXPERTS: tl.constexpr):
    """The tile table of experts with `total` rows each, from row `start` on; a program writes its share."""
    tiles = (total + block_m - 1) // block_m
    first_tile = tl.cumsum(tiles, 0) - tiles
    for i in range(chunk, tl.max(tiles, 0), chunks):
        begin, end = start + i * block_m, tl.minimum(start + (i + 1) * block_m, start + total)
        write_tile(table, first_tile + i, tl.arange(0, EXPERTS), begin, end, i < tiles)
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
        tl.store(num_tiles + 1, tl.sum(total, 0))


@triton.jit
def route_few(
    ids,
    expert_map,
    slots,
    tokens,
    table,
    num_tiles,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    block_m,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """What triton_route does, for at most CHUNK pairs, which one program counts and places."""
    pair = tl.arange(0, CHUNK)
    expert = local_experts(
        ids, expert_map, pair, pairs, topk, shared_expert, ids_64, mapped, routed_experts, num_experts
    )
    total = tl.histogram(tl.maximum(expert, 0), EXPERTS, mask=expert >= 0)
    start = tl.cumsum(total, 0) - total
    row = tl.gather(start, tl.maximum(expert, 0), 0) + numbers(expert, CHUNK)
    place_rows(expert, row, pair, pairs, topk, slots, tokens)
    write_tiles(total, start, table, num_tiles, block_m, 0, 1, EXPERTS)


@triton.jit
def triton_route(
    ids,
    expert_map,
    counts,
    slots,
    tokens,
    table,
    num_tiles,
    parts,
    ids_64,
    mapped,
    shared_expert,
    pairs,
    topk,
    routed_experts,
    num_experts,
    block_m,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The row of each pair to `slots`, -1 for none; the token of each row to `tokens`; and the tile table.

    Rows of an expert are consecutive, in the order of the pairs. A program does a chunk of `parts * CHUNK` pairs;
    `counts` and the numbers in `slots` are from `count_experts`.
    """
    wait_for_previous_kernel(PDL)
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    AT_ONCE: tl.constexpr = 16384 // EXPERTS
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, chunks, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)[:, None]
        counted = tl.load(counts + others * EXPERTS + tl.arange(0, EXPERTS)[None, :], others < chunks, 0)
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where(others < chunk, counted, 0), 0)
    start = tl.cumsum(total, 0) - total
    for part in range(parts):
        pair = (chunk * parts + part) * CHUNK + tl.arange(0, CHUNK)
        expert = local_experts(
            ids, expert_map, pair, pairs, topk, shared_expert, ids_64, mapped, routed_experts, num_experts
        )
        number = tl.load(slots + pair, pair < pairs, 0)
        row = tl.gather(start + before, tl.maximum(expert, 0), 0) + number
        place_rows(expert, row, pair, pairs, topk, slots, tokens)
    write_tiles(total, start, table, num_tiles, block_m, chunk, chunks, EXPERTS)
