"""Orders (token, expert) pairs by expert, and cuts the rows of experts into tiles.

A tile table is int32 `[capacity, 4]`, one entry `(expert, row_begin, row_end, unused)` for each tile; `num_tiles` is
int32 `[2]`, the number of tiles and of rows.
"""

import triton
import triton.language as tl

from fp8moe_plugin.triton_kernels.dependence import wait_for_previous_kernel


@triton.jit
def local_experts(ids, expert_map, pair, pairs, topk, shared, ids_64, mapped, global_experts, num_experts):
    """The local expert of each pair, -1 for none.

    `ids` are int32 `[tokens, topk - shared]`, or if `ids_64` is 1 the halves of int64. `mapped` is 1 if there is an
    expert map, else 0. If `shared` is 1, the last pair of each token is with expert `global_experts`.
    """
    token = pair // topk
    is_shared = pair - token * topk >= topk - shared
    at = pair - token * shared
    routed = (pair < pairs) & (is_shared == 0)
    low = tl.load(ids + at * (1 + ids_64), routed, -1)
    high = tl.load(ids + at * 2 + 1, routed & (pair < pairs * ids_64), 0)
    known = (low >= 0) & (low < global_experts) & (high == 0)
    expert = tl.where(mapped != 0, tl.load(expert_map + low, known & (low < global_experts * mapped), -1), low)
    expert = tl.where(known & (expert >= 0) & (expert < num_experts), expert, -1)
    return tl.where(is_shared & (pair < pairs), global_experts, expert)


@triton.jit
def count_experts(
    chunk,
    ids,
    expert_map,
    counts,
    ids_64,
    mapped,
    shared,
    pairs,
    topk,
    global_experts,
    num_experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The pairs of each expert in a chunk of CHUNK pairs, to int32 `[chunks, EXPERTS]`."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = local_experts(ids, expert_map, pair, pairs, topk, shared, ids_64, mapped, global_experts, num_experts)
    of_chunk = tl.histogram(tl.maximum(expert, 0), EXPERTS, mask=expert >= 0)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), of_chunk)


@triton.jit
def write_tile(table, tile, expert, begin, end, exists):
    entry = table + 4 * tile
    tl.store(entry, expert, exists)
    tl.store(entry + 1, begin, exists)
    tl.store(entry + 2, end, exists)


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
    shared,
    pairs,
    topk,
    global_experts,
    num_experts,
    block_m,
    CHUNK: tl.constexpr,
):
    """What triton_route does, for at most CHUNK pairs: each is compared with all, and no expert is counted."""
    pair = tl.arange(0, CHUNK)
    expert = local_experts(ids, expert_map, pair, pairs, topk, shared, ids_64, mapped, global_experts, num_experts)
    here = expert >= 0
    own, other = expert[None, :], tl.where(here, expert, num_experts)[:, None]
    number = tl.sum(((own == other) & (pair[:, None] < pair[None, :])).to(tl.int32), 0)  # among its expert's pairs
    start = tl.sum((other < own).to(tl.int32), 0)
    end = start + tl.sum((own == other).to(tl.int32), 0)
    row = start + number
    tl.store(slots + pair, tl.where(here, row, -1), pair < pairs)
    tl.store(tokens + row, pair // topk, here)

    opens = here & (number % block_m == 0)
    tile = tl.sum((tl.where(opens, row, pairs)[:, None] < row[None, :]).to(tl.int32), 0)
    write_tile(table, tile, expert, row, tl.minimum(row + block_m, end), opens)
    tl.store(num_tiles, tl.sum(opens.to(tl.int32), 0))
    tl.store(num_tiles + 1, tl.sum(here.to(tl.int32), 0))


@triton.jit
def number_in_chunk(
    expert,
    chunk,
    ids,
    expert_map,
    pairs,
    topk,
    shared,
    ids_64,
    mapped,
    global_experts,
    num_experts,
    CHUNK: tl.constexpr,
):
    """How many earlier pairs of the chunk each pair's expert has."""
    number = tl.zeros([CHUNK], tl.int32)
    for first in range(0, CHUNK, 32):  # a part at a time, as all of them would not fit the registers
        other = first + tl.arange(0, 32)
        of_other = local_experts(
            ids, expert_map, chunk * CHUNK + other, pairs, topk, shared, ids_64, mapped, global_experts, num_experts
        )
        earlier = (of_other[:, None] == expert[None, :]) & (other[:, None] < tl.arange(0, CHUNK)[None, :])
        number += tl.sum(earlier.to(tl.int32), 0)
    return number


@triton.jit
def triton_route(
    ids,
    expert_map,
    counts,
    slots,
    tokens,
    table,
    num_tiles,
    ids_64,
    mapped,
    shared,
    pairs,
    topk,
    global_experts,
    num_experts,
    block_m,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The row of each pair to `slots`, -1 for none; the token of each row to `tokens`; and the tile table.

    Rows of an expert are consecutive, in the order of the pairs. A program does a chunk; `counts` is from
    `count_experts`.
    """
    wait_for_previous_kernel(PDL)
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = local_experts(ids, expert_map, pair, pairs, topk, shared, ids_64, mapped, global_experts, num_experts)
    here = expert >= 0
    experts = tl.arange(0, EXPERTS)

    # Rows of all chunks, and of those before this one, for each expert.
    AT_ONCE: tl.constexpr = 4096 // EXPERTS
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, chunks, AT_ONCE):
        others = first + tl.arange(0, AT_ONCE)[:, None]
        counted = tl.load(counts + others * EXPERTS + experts[None, :], others < chunks, 0)
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where(others < chunk, counted, 0), 0)
    start = tl.cumsum(total, 0) - total

    number = number_in_chunk(
        expert, chunk, ids, expert_map, pairs, topk, shared, ids_64, mapped, global_experts, num_experts, CHUNK
    )
    row = tl.gather(start + before, tl.maximum(expert, 0), 0) + number
    tl.store(slots + pair, tl.where(here, row, -1), pair < pairs)
    tl.store(tokens + row, pair // topk, here)

    tiles = (total + block_m - 1) // block_m
    first_tile = tl.cumsum(tiles, 0) - tiles
    for i in range(chunk, tl.max(tiles, 0), chunks):
        begin = start + i * block_m
        write_tile(table, first_tile + i, experts, begin, tl.minimum(begin + block_m, start + total), i < tiles)
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
        tl.store(num_tiles + 1, tl.sum(total, 0))
