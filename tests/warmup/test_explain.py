"""`explain`: the figures of long steps equal the sums over all tiles, but take no longer than those of short steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.checkpoint.shapes import Model, Parallel, rank_shapes
from fp8moe_plugin.plan import MoeShape, plan_step, tiles
from tests import helpers as h
from warmup import explain as explanation
from warmup.options import MAX_CAPTURE_SIZES, MAX_COUNT, parse

TILE_ROWS = (tiles.FEW_ROWS_TILE, tiles.MANY_ROWS_TILE)


@given(st.lists(st.integers(0, 4000), max_size=40), st.sampled_from(TILE_ROWS))
def test_the_rows_of_all_experts_are_those_of_each_added_up(rows: list[int], tile_rows: int) -> None:
    added_up = sum(tiles.computed_rows(count, tile_rows) for count in rows)
    assert explanation._multiplied(np.array(rows, dtype=int), tile_rows) == added_up


@pytest.mark.parametrize("parallel", [Parallel(8), Parallel(1, 8, ep=8)], ids=str)
def test_the_longest_step_takes_no_longer_than_a_short_one(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, parallel: Parallel
) -> None:
    """Counts tiles instead of measuring time."""
    looked_at = []

    def counted(rows: int, tile_rows: int) -> int:
        looked_at.append(rows // tile_rows + 1)
        return tiles.computed_rows(rows, tile_rows)

    monkeypatch.setattr(explanation, "computed_rows", counted)
    found = explanation.explain(models["DeepSeek-V3"], parallel, MAX_COUNT, (MAX_COUNT - 1,))
    assert 0 < sum(looked_at) < 50_000
    assert [step.padding for step in found.steps] == pytest.approx([0, 0], abs=0.01)


def test_a_split_that_no_other_replaces_is_the_best(models: dict[str, Model]) -> None:
    """Neither tensor parallelism alone nor whole experts can use as many GPUs."""
    found = explanation.explain(models["DeepSeek-V3"], Parallel(1, 2048), 1, (1,))
    assert found.best == "--tp 1 --dp 2048"
    assert [way.options for way in found.layouts if way.refusal is None] == [found.best]


@pytest.mark.parametrize(
    ("name", "parallel", "shared"),
    [
        ("DeepSeek-V3", Parallel(8), 1),
        ("DeepSeek-V3.2-Exp", Parallel(8), 1),
        ("Kimi-K2-Instruct", Parallel(16), 1),
        ("DeepSeek-V3", Parallel(8, ep=8), 0),
        ("DeepSeek-V3", Parallel(8, sglang=True), 0),
        ("GLM-4.6", Parallel(8), 0),  # of another class in vLLM
        ("Qwen3-235B-A22B-FP8", Parallel(4), 0),
    ],
)
def test_a_merged_shared_expert_is_one_of_the_layers_experts(
    models: dict[str, Model], name: str, parallel: Parallel, shared: int
) -> None:
    found, e = explanation.explain(models[name], parallel, 2048, (8,)), models[name].experts
    local = rank_shapes(models[name], parallel).experts
    shape = MoeShape(e.topk + shared, e.hidden, local.intermediate, local.experts + shared, e.experts + shared)
    assert [step.workspace_bytes for step in found.steps] == [plan_step(shape, n).scratch.nbytes for n in (8, 2048)]
    text = explanation.text(models[name], parallel, found, 2048)
    assert ("Under vLLM the shared expert is one more expert" in text) == bool(shared)
    with h.environment("FP8MOE_MERGE_SHARED_EXPERT", "0"):
        apart = explanation.explain(models[name], parallel, 2048, (8,))
    assert (apart.workspace_bytes < found.workspace_bytes) == bool(shared)
    assert apart.weight_bytes == found.weight_bytes


def test_too_many_capture_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size is a step to compute, so their number bounds the time."""

    def arguments(count: int) -> list[str]:
        return ["explain", "--model", "x", "--cudagraph-capture-sizes", *map(str, range(1, count + 1))]

    assert len(parse(arguments(MAX_CAPTURE_SIZES)).capture_sizes) == MAX_CAPTURE_SIZES
    with pytest.raises(SystemExit) as caught:
        parse(arguments(MAX_CAPTURE_SIZES + 1))
    assert caught.value.code == 2
    assert "--cudagraph-capture-sizes accepts at most 1024 sizes, not 1025" in capsys.readouterr().err
