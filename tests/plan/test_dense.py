"""What the plan of a dense GEMM chooses."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.catalog import (
    DENSE_CLUSTER,
    DENSE_TILE_N,
    DENSE_TILE_ROWS,
    dense_gemm_few_rows_key,
    dense_gemm_key,
    dense_gemm_many_rows_key,
    grouped_gemm_key,
)
from fp8moe_plugin.plan.sm90.constants import MAX_CLUSTER_SPLITS
from fp8moe_plugin.plan.sm90.dense import DensePlan, fastest_tile, plan_dense
from fp8moe_plugin.plan.sm90.tiles import MANY_ROWS, count_row_tiles, row_tiles
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.plan.tuning import (
    DENSE_CLUSTER_COST,
    DENSE_COST,
    DENSE_MANY_ROWS_TILE_N,
    DENSE_ROWS,
    DENSE_SPLITS,
    DENSE_WAVE_COLUMNS,
    DENSE_WAVE_K,
    DENSE_WAVE_ROWS,
    L2_BYTES,
    LONG_K,
)

SHAPES = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (8, 128), (128, 18432), (320, 2944)]


def plan(m: int, n: int, k: int, output: Output = Output.BF16) -> DensePlan:
    return plan_dense(m, n, k, output, 132)


def test_few_rows_stream_weights_where_columns_are_few_and_k_is_long():
    plans = {shape: plan(32, *shape) for shape in SHAPES}
    streamed = [shape for shape, found in plans.items() if found.kernel == dense_gemm_few_rows_key()]
    assert streamed == [(2112, 7168), (128, 18432)]
    assert all(plan(33, *shape).kernel != dense_gemm_few_rows_key() for shape in SHAPES)
    assert [plan(m, 2112, 7168).tile_rows for m in (1, 8, 9, 17, 32)] == [8, 8, 16, 32, 32]
    assert plan(1, 2112, 7168).blocks == 33 * DENSE_SPLITS
    assert min(MAX_CLUSTER_SPLITS, LONG_K // 128) >= plan(1, 2112, 7168).cluster == DENSE_SPLITS


def test_dense_tiles_are_as_fast_as_any_were():
    """Among the tiles that were timed on an H200, see docs/tuning.md#DENSE_STORE."""
    rows = (1, 64, 128, 192, 256)
    assert [[fastest_tile(m, n, k, 132) for m in rows] for n, k in SHAPES[:5]] == [
        [(64, 16), (64, 16), (64, 32), (64, 64), (64, 64)],
        [(64, 192), (64, 192), (128, 192), (128, 192), (128, 192)],
        [(64, 128), (64, 128), (128, 128), (64, 192), (128, 128)],
        [(64, 64), (64, 64), (128, 64), (128, 112), (128, 112)],
        [(64, 32), (64, 32), (64, 64), (64, 96), (128, 64)],
    ]


def test_the_kernel_is_compiled_for_the_tile():
    for m, (n, k) in itertools.product((33, 64, 65, 200), SHAPES):
        found = plan(m, n, k)
        assert found.kernel == dense_gemm_key(found.tile_rows)
        assert (found.tile_rows, found.tile_n) == fastest_tile(m, n, k, 132)
        assert found.blocks == min(132, -(-m // found.tile_rows) * -(-n // found.tile_n))


def test_many_rows_of_short_k_are_one_group():
    for m, k, grouped in ((1, 7168, False), (200, 7168, False), (5000, 7168, False), (5000, 512, True)):
        assert plan(m, 2112, k).is_grouped is grouped


@given(m=st.integers(1, 4096), n=st.sampled_from((8, 512, 2112, 7168, 36864)), k=st.sampled_from((128, 1536, 7168)))
def test_weights_larger_than_l2_get_fewest_row_tiles(m, n, k):
    tile_rows, tile_n = fastest_tile(m, n, k, 132)
    assert (tile_rows, tile_n) in itertools.product(DENSE_TILE_ROWS, DENSE_TILE_N)
    if n * k > L2_BYTES:
        assert tile_rows == (64 if m <= 64 else 128)


@pytest.mark.parametrize(
    ("n", "k", "tiles"),  # columns per tile of dense_gemm_many_rows by rows
    [
        (2112, 7168, {2048: 144, 3072: 192, 4096: 176, 6144: 192, 16384: 192}),
        (4096, 7168, {1024: 256, 3000: 256, 4096: 256}),
        (24576, 1536, {1024: 256, 4096: 256}),
        (7168, 16384, {1024: 256, 4096: 256}),
        (7168, 2048, {1024: 256, 4096: 256, 8192: 256}),
        (4096, 2048, {1024: 256, 8192: 256}),
        (5120, 2048, {2048: 176}),
        (4608, 7168, {1024: 144}),
    ],
)
def test_tiles_of_many_rows_are_as_fast_as_any_were(n, k, tiles):
    """Among those of docs/experiments/058-dense-many-rows.md, within half a percent."""
    for m, columns in tiles.items():
        found = plan(m, n, k)
        assert (found.kernel, found.tile_n) == (dense_gemm_many_rows_key(columns), columns)
        assert (found.blocks, found.tile_rows) == (132, MANY_ROWS.rows)


def test_blocks_of_many_rows_come_in_clusters():
    for sms in (132, 114, 113):
        found = plan_dense(4096, 4096, 7168, Output.BF16, sms)
        assert found.kernel == dense_gemm_many_rows_key(found.tile_n)
        assert found.blocks == sms // DENSE_CLUSTER * DENSE_CLUSTER
    assert plan_dense(4096, 4096, 7168, Output.BF16, 1).kernel == grouped_gemm_key(Output.BF16)


@pytest.mark.parametrize(
    ("m", "n", "k", "source"),
    [
        (640, 7168, 16384, "dense_gemm"),  # 5 row tiles are 3 pairs
        (784, 7168, 4096, "dense_gemm"),
        (3000, 7168, 2048, "grouped_gemm"),  # 23 row tiles with tails, but 12 pairs without
        (4100, 4096, 7168, "grouped_gemm"),
    ],
)
def test_other_kernels_run_where_pairs_of_row_tiles_take_more_waves(m, n, k, source):
    assert plan(m, n, k).kernel.source == source


@given(
    m=st.integers(DENSE_ROWS + 1, 20_000), n=st.integers(1, 5000).map(lambda n: 8 * n), sms=st.sampled_from((132, 78))
)
def test_waves_of_tiles_have_fewer_columns_than_those_of_grouped_gemm(m, n, sms):
    """By at least what the model's factors are apart."""
    found = plan_dense(m, n, 4096, Output.BF16, sms)
    rows, at_once = -(-m // 128), sms
    if found.kernel.source == "dense_gemm_many_rows":
        rows, at_once, factor = -(-rows // DENSE_CLUSTER), sms // DENSE_CLUSTER, DENSE_CLUSTER_COST[found.tile_n]
    elif found.kernel.source == "dense_gemm":
        factor = DENSE_COST
    else:
        return
    waves = -(-rows * -(-n // found.tile_n) // at_once)
    of_grouped_gemm = -(-count_row_tiles(m, MANY_ROWS) * -(-n // 256) // sms)
    columns = DENSE_WAVE_COLUMNS
    assert waves == 1 or factor * waves * (found.tile_n + columns) < of_grouped_gemm * (256 + columns)


def test_waves_are_not_counted_where_they_were_not_measured():
    assert plan(6160, 1024, 4096).kernel.source == "dense_gemm"
    assert plan(12545, 576, 4096).kernel.source == "dense_gemm_many_rows"  # dense_gemm would have the fewest columns
    assert 6160 < DENSE_WAVE_ROWS < 12545
    assert plan(640, 7168, DENSE_WAVE_K).kernel.source == "dense_gemm"
    assert {plan(m, 7168, DENSE_WAVE_K - 128).kernel.source for m in (640, 4096)} == {"grouped_gemm"}


@given(m=st.integers(1, 1500), n=st.sampled_from((512, 2048, 2112, 7168, 36864)), k=st.sampled_from((256, 2048, 7168)))
def test_untimed_tiles_are_used_only_for_many_rows(m, n, k):
    tile_rows, tile_n = fastest_tile(m, n, k, 132)
    assert tile_n not in DENSE_MANY_ROWS_TILE_N or (m > DENSE_ROWS and tile_rows == 128)


def test_dense_gemms_of_many_rows_stay_with_one_round_of_tiles():
    assert [plan(m, 2112, 7168).kernel.source for m in (257, 512, 1024)] == ["dense_gemm"] * 3
    assert [plan(m, 36864, 7168).kernel.source for m in (384, 385)] == ["dense_gemm", "grouped_gemm"]
    assert plan(385, 36864, 7168).kernel == grouped_gemm_key(Output.BF16, 256)
    for output in (Output.F32_DIRECT, Output.BF16_DIRECT):
        assert plan(64, 2112, 7168, output).kernel.source == "grouped_gemm"


@pytest.mark.parametrize(("m", "n"), [(129, 8448), (129, 8456), (1040, 2112), (1040, 2120), (1, 24576)])
def test_tiles_of_other_results_are_narrow_where_these_are_one_round(m, n):
    narrow = len(row_tiles(m, MANY_ROWS)) * -(-n // 128)
    found = plan(m, n, 7168, Output.F32_DIRECT)
    assert found.tile_n == (128 if narrow <= 132 else 256)
    assert found.kernel == grouped_gemm_key(Output.F32_DIRECT, found.tile_n)


@pytest.mark.parametrize("target", [SM90, "sm_89"])
def test_the_format_of_weights_changes_the_kernel_and_nothing_else(target: str) -> None:
    backend = BACKENDS[target]
    blocks, rows = (set(backend.dense_kernels(False, weights)) for weights in (FP8_BLOCK, FP8_CHANNEL))
    assert len(blocks) == len(rows)
    for m, (n, k) in itertools.product((1, 64, 400, 5000), [(2112, 7168), (1536, 512), (40008, 1664)]):
        block, row = (
            backend.plan_dense(m, n, k, Output.BF16, 132, False, weights).choices
            for weights in (FP8_BLOCK, FP8_CHANNEL)
        )
        assert row.kernel in rows - blocks
        assert replace(row, kernel=block.kernel) == block


@pytest.mark.parametrize("weights", [FP8_BLOCK, FP8_CHANNEL])
@pytest.mark.parametrize("biased", [False, True])
def test_a_plan_adds_the_bias_that_its_kernel_takes(weights, biased):
    """The op adds no bias after a plan that `adds_bias`, so a kernel without it would lose it."""
    added = set()
    for m, (n, k), invariant in itertools.product((1, 32, 64, 300, 5000), SHAPES, (False, True)):
        found = BACKENDS[SM90].plan_dense(m, n, k, Output.BF16, 132, invariant, weights, biased)
        assert ("BIAS" in dict(found.choices.kernel.defines)) is (biased and found.adds_bias)
        added.add(found.adds_bias)
    assert added == {False, True}
