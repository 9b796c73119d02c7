"""The launches of a grouped GEMM that is called as an op: its tile table, then the GEMM."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Rows, Weights, placed
from fp8moe_plugin.launches.sm90.gemm import grouped_launch
from fp8moe_plugin.launches.sm90.tiles import (
    Tiles,
    tiles_of_counts_launch,
    tiles_of_ends_launch,
    tiles_of_indices_launch,
)
from fp8moe_plugin.plan.sm90.grouped import GroupedPlan
from fp8moe_plugin.plan.spec import GroupedBy, Grouping


def grouped_launches(
    plan: GroupedPlan, grouping: Grouping, a: Rows, b: Weights, out: Address, layout: Address, scratch: Address
) -> list[Launch]:
    """Returns the launches of a grouped GEMM; `layout` is the address of the tensor that `grouping` names."""
    at, groups = placed(plan.scratch, scratch), b.experts
    tiles = Tiles(at.table, at.num_tiles, at.done_counters)
    match grouping.kind:
        case GroupedBy.INDICES:
            tiles = Tiles(at.table, at.num_tiles)
            first = tiles_of_indices_launch(
                plan.blocks, layout, a.rows, groups, at.run_begins, tiles, plan.tile.rows, out, b.n
            )
        case GroupedBy.COUNTS:
            first = tiles_of_counts_launch(layout, groups, a.rows // groups, tiles, plan.tile.rows)
        case GroupedBy.ENDS:
            first = tiles_of_ends_launch(layout, groups, a.rows, grouping.alignment, tiles, plan.tile.rows)
    return [first, grouped_launch(plan, a, b, out, tiles)]
