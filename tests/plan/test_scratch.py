"""Pieces of scratch memory do not overlap, and have room for what the kernels write."""

import pytest

from fp8moe_plugin.ops.grouped_gemm import BY_COUNTS, BY_INDICES
from fp8moe_plugin.plan.scratch import PIECE, tile_capacity
from fp8moe_plugin.plan.sm90.grouped import plan_batched, plan_grouped
from fp8moe_plugin.plan.sm90.layer import SortedStep
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h


def sizes(scratch: tuple[int, ...]) -> dict[str, int]:
    """The bytes of each piece."""
    ends = (*scratch[1:-1], scratch[-1])
    assert all(begin % PIECE == 0 <= end - begin for begin, end in zip(scratch[:-1], ends, strict=True))
    return {name: end - begin for name, begin, end in zip(scratch._fields, scratch[:-1], ends, strict=False)}


@pytest.mark.parametrize("intermediate", [128, 1152])
@pytest.mark.parametrize("tokens", [20, 128, 129, 1000, 20_000])
def test_a_sorted_step_has_room(tokens, intermediate):
    topk, hidden, experts = 8, 1024, 32
    step = h.plan_step(MoeShape(topk, hidden, intermediate, experts, 64), tokens)
    assert isinstance(step, SortedStep)
    room, rows = sizes(step.scratch), tokens * topk
    tiles = tile_capacity(rows, experts, step.tile_rows)
    needed = {
        "x": (tokens if step.gathers else rows) * hidden,
        "x_scales": (tokens if step.gathers else rows) * hidden // 128 * 4,
        "slots": 4 * rows,
        "tokens": 4 * rows,
        "num_rows": 4,
        "expert_counts": 2 * experts * step.route_chunks if step.route_chunks > 1 else 0,
        "table": 16 * tiles,
        "num_tiles": 20,
        "done_counters": 4 + 4 * tiles * step.row_counters,
        "partial": 8 * step.k_splits * rows * intermediate if step.k_splits > 1 else 0,
        "inner": rows * intermediate,
        "inner_scales": rows * intermediate // 128 * 4,
        "down": 2 * rows * hidden,
    }
    assert room.keys() == needed.keys()
    for name, nbytes in needed.items():
        assert nbytes <= room[name] < nbytes + PIECE + 16 * hidden // 128, name


def test_a_small_batch_has_room_for_the_experts_it_may_have():
    step = h.plan_step(MoeShape(8, 2048, 768, 128, 128), 12)
    room = sizes(step.scratch)
    assert room == {"inner": 96 * 16 * 768, "inner_scales": 4 * 96 * 16 * 6, "tokens_written": 4 * 96 * 6}


@pytest.mark.parametrize(("groups", "max_m"), [(1, 1), (4, 130), (32, 1000)])
def test_grouped_rows_have_room(groups, max_m):
    rows = groups * max_m
    masked, batched, contiguous = (
        plan_grouped(BY_COUNTS, groups * max_m, groups, 256, 256, 64, 132),
        plan_batched(LayerSpec(MoeShape(1, 128, 256, groups, groups)), max_m, 64),
        plan_grouped(BY_INDICES, rows, rows, 256, 256, 0, 132),
    )
    tiles = tile_capacity(rows, groups, masked.tile_rows)
    room = sizes(masked.scratch)
    assert room["table"] >= 16 * tiles
    assert room["done_counters"] >= 4 * (1 + tiles)
    assert room["run_begins"] == 0
    room = sizes(contiguous.scratch)
    assert room["table"] >= 16 * tile_capacity(rows, rows, contiguous.tile_rows)
    assert room["run_begins"] >= 4 * rows
    room = sizes(batched.scratch)
    assert room["inner"] >= rows * 256
    assert room["inner_scales"] >= rows * 2 * 4
    assert room["num_tiles"] >= 20
