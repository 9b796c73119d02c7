import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.checkpoint.shapes import MAX_LOCAL_EXPERTS
from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.ops import fused_moe
from fp8moe_plugin.plan.scratch import tile_capacity
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS, PACKED_WIDE, SHARED, row_tiles
from tests import helpers as h
from tests.steps import TileTensors, route, tiles_of_counts, tiles_of_ends, tiles_of_indices

kinds_of_tiles = st.sampled_from((FEW_ROWS, PACKED_WIDE, MANY_ROWS, SHARED))


def rows_of_tiles(tiles: TileTensors) -> dict[int, int]:
    """Row -> expert, as a kernel reads the table; fails if two tiles share a row."""
    count = int(tiles.num_tiles[0])
    assert count <= tiles.table.shape[0]
    owner: dict[int, int] = {}
    for i, (expert, begin, end, first) in enumerate(tiles.table[:count].tolist()):
        sizes = row_tiles(end - begin, tiles.tile)
        start = begin + sum(sizes[: i - first])
        for row in range(start, start + sizes[i - first]):
            assert row not in owner
            owner[row] = expert
    return owner


def expected_slots(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """Returns the slot of each pair, and the expert of each row, with Python's stable sort."""
    pairs = ids.flatten().tolist()
    if expert_map is not None:
        local = expert_map.tolist()
        pairs = [local[i] if 0 <= i < len(local) else -1 for i in pairs]
    order = sorted((i for i, e in enumerate(pairs) if 0 <= e < experts), key=lambda i: pairs[i])
    slots = [-1] * len(pairs)
    for row, pair in enumerate(order):
        slots[pair] = row
    return slots, [pairs[i] for i in order]


@given(
    tokens=h.row_counts,
    topk=st.integers(1, 8),
    kind=st.sampled_from(h.ROUTINGS),
    tile=kinds_of_tiles,
    wide=st.booleans(),
    mapped=st.booleans(),
    seed=h.seeds,
)
def test_rows_follow_by_expert_then_by_token_and_tiles_cover_them_once(
    device, tokens, topk, kind, tile, wide, mapped, seed
):
    gen = h.seeded(seed, device)
    _, ids = h.random_routing(gen, kind, tokens, topk, 16)
    ids = ids.long() if wide else ids
    experts, expert_map = 16, None
    if mapped:
        experts = 5
        expert_map = torch.full((16,), -1, dtype=torch.int32, device=device)
        expert_map[torch.randperm(16, generator=gen, device=device)[:5]] = torch.arange(5, device=device).int()
    routing = route(ids, experts, tile, expert_map)
    slots, experts_of_rows = expected_slots(ids, experts, expert_map)
    assert routing.slots.flatten().tolist() == slots
    assert routing.slots.shape == ids.shape
    assert int(routing.num_rows) == len(experts_of_rows)
    rows = torch.arange(len(experts_of_rows), device=device)
    assert torch.equal((routing.slots[routing.tokens[rows].long()] == rows[:, None]).sum(1), torch.ones_like(rows))
    assert rows_of_tiles(routing.tiles) == dict(enumerate(experts_of_rows))


@pytest.mark.parametrize("experts", [1, 8, 256])
def test_many_tokens_are_routed_like_few(device, experts):
    _, ids = h.random_routing(h.seeded(0, device), "some_missing", 3000, min(8, experts), experts)
    routing = route(ids, experts, MANY_ROWS)
    slots, experts_of_rows = expected_slots(ids, experts, None)
    assert routing.slots.flatten().tolist() == slots
    assert rows_of_tiles(routing.tiles) == dict(enumerate(experts_of_rows))


def one_expert(device: torch.device) -> h.Layer:
    return h.random_layer(h.seeded(0, device), 1, 128, 128)


def test_more_experts_than_a_block_counts_are_refused(device):
    ids = torch.tensor([[0, MAX_LOCAL_EXPERTS - 1, MAX_LOCAL_EXPERTS]], dtype=torch.int32, device=device)
    assert route(ids, MAX_LOCAL_EXPERTS, FEW_ROWS).slots.tolist() == [[0, 1, -1]]
    layer = h.Layer(*(part.expand(MAX_LOCAL_EXPERTS + 1, -1, -1).contiguous() for part in one_expert(device)))
    tokens = torch.zeros(1, 128, dtype=torch.bfloat16, device=device)
    with pytest.raises(
        InvalidInputError, match=r"w13: a rank has 1025 experts, .* supports at most 1024. Spread the experts"
    ):
        fused_moe(tokens, *layer, torch.ones(1, 3, device=device), ids)


@given(
    counts=st.lists(st.integers(-3, 210), min_size=1, max_size=12),
    max_m=st.sampled_from((1, 64, 129, 200)),
    tile=kinds_of_tiles,
)
def test_tiles_of_counts_cover_the_rows_that_count(device, counts, max_m, tile):
    tiles = tiles_of_counts(torch.tensor(counts, dtype=torch.int32, device=device), max_m, tile)
    clamped = [min(max(count, 0), max_m) for count in counts]
    assert rows_of_tiles(tiles) == {g * max_m + i: g for g, count in enumerate(clamped) for i in range(count)}
    table = tiles.table[: int(tiles.num_tiles[0])].tolist()
    tailed = [max(row_tiles(end - begin, tile)) > tile.rows for _, begin, end, _ in table]
    assert tailed == sorted(tailed, reverse=True)


@given(
    runs=st.lists(st.tuples(st.integers(-2, 6), st.sampled_from((1, 2, 63, 64, 65, 130))), min_size=1, max_size=10),
    tile=kinds_of_tiles,
)
def test_tiles_of_indices_cover_the_rows_with_an_expert(device, runs, tile):
    indices = [expert for expert, length in runs for _ in range(length)]
    out = h.poisoned(len(indices), 24, dtype=torch.bfloat16, device=device)
    tiles = tiles_of_indices(torch.tensor(indices, dtype=torch.int32, device=device), 5, tile, out)
    assert rows_of_tiles(tiles) == {row: e for row, e in enumerate(indices) if 0 <= e < 5}
    here = torch.tensor([0 <= e < 5 for e in indices], device=device)
    assert h.untouched(out[here])
    assert (out[~here] == 0).all()


@given(
    lengths=st.lists(st.sampled_from((0, 1, 63, 64, 65, 130)), min_size=1, max_size=10),
    alignment=st.sampled_from((1, 64, 128)),
    tile=kinds_of_tiles,
)
def test_tiles_of_ends_cover_the_rows_of_groups(device, lengths, alignment, tile):
    ends, expected, begin = [], {}, 0
    for group, length in enumerate(lengths):
        expected |= {begin + i: group for i in range(length)}
        ends.append(begin + length)
        begin = -(-ends[-1] // alignment) * alignment
    tiles = tiles_of_ends(torch.tensor(ends, dtype=torch.int32, device=device), ends[-1] + 5, alignment, tile)
    assert rows_of_tiles(tiles) == expected


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20), tile=kinds_of_tiles)
def test_the_capacity_holds_the_tiles_of_any_runs(lengths, tile):
    assert sum(len(row_tiles(length, tile)) for length in lengths) <= tile_capacity(
        sum(lengths), len(lengths), tile.rows
    )


@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
def test_tiles_hold_all_rows_and_only_full_ones_have_a_tail(tile):
    for rows in range(1, 3000):
        sizes = row_tiles(rows, tile)
        assert sum(sizes) == rows
        assert all(tile.rows <= size <= tile.rows + tile.tail_rows for size in sizes[:-1])
        assert 0 < sizes[-1] <= tile.rows + tile.tail_rows
