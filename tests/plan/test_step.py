"""What a step's plan chooses, and for which models."""

import re

import pytest

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.ops.grouped_gemm import BY_COUNTS
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.catalog import (
    MULTIPROCESSOR_SMEM_BYTES,
    SMALL_BATCH_STAGES,
    down_small_batch_key,
    gate_up_small_batch_key,
    permute_key,
)
from fp8moe_plugin.plan.sm90.grouped import columns_at_once, plan_batched, plan_grouped
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep, down_splits, gate_up_clusters, plan_layer
from fp8moe_plugin.plan.sm90.tiles import (
    FEW_ROWS,
    MANY_ROWS,
    PACKED_FEW_ROWS,
    PACKED_WIDE,
    SHARED,
    computed_rows,
    row_tiles,
)
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h
from tests.emulator.build import CSRC

DEEPSEEK_V3, DEEPSEEK_V3_TP8 = MoeShape(8, 7168, 2048, 256, 256), MoeShape(8, 7168, 256, 256, 256)
DEEPSEEK_V3_EP8, QWEN3_30B = MoeShape(8, 7168, 2048, 32, 256), MoeShape(8, 2048, 768, 128, 128)


def padded_tokens(shape: MoeShape, tokens: int) -> int:
    """Padded token count of a small batch, 0 for other steps."""
    step = h.plan_step(shape, tokens)
    return step.padded_tokens if isinstance(step, SmallBatchStep) else 0


def sorted_step(shape: MoeShape, tokens: int) -> SortedStep:
    step = h.plan_step(shape, tokens)
    assert isinstance(step, SortedStep)
    return step


def test_a_step_has_one_plan():
    plan = BACKENDS[SM90].plan_layer
    assert plan(LayerSpec(QWEN3_30B), 12, 132) is plan(LayerSpec(MoeShape(*QWEN3_30B)), 12, 132)
    assert plan(LayerSpec(QWEN3_30B), 12, 132) is not plan(LayerSpec(QWEN3_30B, ue8m0=True), 12, 132)


@pytest.mark.parametrize("target", [SM90, "sm_90"])
def test_expected_rows_with_equal_choices_share_a_plan(target: str) -> None:
    """Their launches are prepared once."""
    backend, spec = BACKENDS[target], LayerSpec(MoeShape(1, 256, 256, 4, 4))
    assert backend.plan_batched(spec, 64, 1, 132) is backend.plan_batched(spec, 64, 2, 132)
    masked = [backend.plan_grouped(BY_COUNTS, 256, 4, 256, 256, expected_m, 132) for expected_m in (1, 2)]
    assert masked[0] is masked[1]


def test_a_small_batch_is_one_of_few_tokens_and_few_bytes():
    for shape in (DEEPSEEK_V3_TP8, QWEN3_30B, DEEPSEEK_V3_EP8):
        assert [padded_tokens(shape, tokens) for tokens in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    many_channels = DEEPSEEK_V3._replace(intermediate=8192)
    assert [padded_tokens(many_channels, tokens) for tokens in (1, 6, 7)] == [8, 8, 0]
    assert padded_tokens(MoeShape(33, 128, 128, 4, 4), 8) == padded_tokens(MoeShape(8, 8192 + 128, 128, 4, 4), 1) == 0


def test_shared_expert_does_not_change_small_batch_choice():
    """16 tokens are 144 pairs then, of the 176 that fit."""
    for shape in (DEEPSEEK_V3_TP8, DEEPSEEK_V3):
        merged = shape.with_shared_expert()
        assert merged == MoeShape(9, 7168, shape.intermediate, 257, 257)
        assert [padded_tokens(merged, n) for n in range(1, 18)] == [padded_tokens(shape, n) for n in range(1, 18)]


def test_a_wide_small_batch_needs_long_parts_of_k():
    assert [padded_tokens(MoeShape(8, hidden, 256, 128, 128), 9) for hidden in (1920, 2048)] == [0, 16]


@pytest.mark.parametrize("weights", FORMATS, ids=str)
@pytest.mark.parametrize("kind", SMALL_BATCH_STAGES)
def test_small_batch_kernels_share_a_multiprocessor(kind, weights):
    spec = h.layer_spec(weights=weights)
    first, second = gate_up_small_batch_key(spec, *kind), down_small_batch_key(spec, *kind)
    for pair in (first, first), (first, second):
        assert sum(key.smem_bytes + 1024 for key in pair) <= MULTIPROCESSOR_SMEM_BYTES
        assert sum(key.threads for key in pair) <= 2048
    if weights is PACKED_MXFP4:
        assert 2 * (second.smem_bytes + 1024) > MULTIPROCESSOR_SMEM_BYTES


@pytest.mark.parametrize(
    ("channels", "local_experts", "most"),
    [(2048, 256, 4), (4096, 256, 2), (256, 256, 13), (4096, 32, 8), (4096, 8, 16)],
)
def test_small_batches_of_packed_weights_read_fewer_bytes(channels, local_experts, most):
    spec = LayerSpec(MoeShape(6, 4096, channels, local_experts, 256), weights=PACKED_MXFP4)
    steps = [plan_layer(spec, tokens) for tokens in (most, most + 1)]
    assert [type(step) for step in steps] == [SmallBatchStep, SortedStep]


@pytest.mark.parametrize("change", [{"further_steps": (0, 1)}, {"further_steps": (2, 0)}, {"batch_invariant": True}])
def test_packed_layers_with_further_steps_are_sorted(change):
    spec = h.layer_spec(weights=PACKED_MXFP4)._replace(**change)
    step = plan_layer(spec, 1)
    assert isinstance(step, SortedStep)
    assert step.tile is PACKED_FEW_ROWS


def test_kernels_that_decode_for_many_rows_have_whole_clusters():
    grids = {sms: (SHARED.grid(sms), MANY_ROWS.grid(sms)) for sms in (1, 2, 7, 114, 131, 132)}
    assert grids == {1: (2, 1), 2: (2, 2), 7: (6, 7), 114: (114, 114), 131: (130, 131), 132: (132, 132)}
    spec = LayerSpec(QWEN3_30B, weights=PACKED_MXFP4)
    steps = plan_layer(spec, 4096, 131), plan_batched(spec, 512, 512, 131)
    assert [(step.tile, step.blocks, step.down_blocks) for step in steps] == [(SHARED, 130, 130)] * 2


def test_blocks_of_shared_tiles_multiply_64_rows_at_once():
    """A tile of more than 128 rows has as many in one block as it can, up to 64 more than in the other."""
    rows = [0, 1, 64, 65, 128, 129, 192, 193, 256, 257, 600]
    assert [computed_rows(count, SHARED) for count in rows] == [0, 64, 64, 128, 128, 192, 192, 256, 256, 320, 640]
    assert [row_tiles(count, SHARED) for count in (256, 257, 600)] == [[256], [256, 1], [256, 256, 88]]


@pytest.mark.parametrize(
    ("weights", "most", "few", "many"),
    [(FP8_BLOCK, 28, FEW_ROWS, MANY_ROWS), (PACKED_MXFP4, 60, PACKED_FEW_ROWS, SHARED)],
)
def test_tiles_of_batched_experts_follow_the_expected_rows(weights, most, few, many):
    plans = [plan_batched(h.layer_spec(weights=weights), 512, expected_m) for expected_m in (1, most, most + 1)]
    assert [plan.tile for plan in plans] == [few, few, many]


@pytest.mark.parametrize(
    ("channels", "tokens", "tiles_per_cluster"),
    [(256, 1, 1), (256, 4, 3), (1280, 1, 4), (1408, 1, 4.4), (2048, 1, 6.4)],
)
def test_the_second_gemm_of_small_batches_starts_later(channels, tokens, tiles_per_cluster):
    """With packed weights, it starts later only if there are many tiles."""
    for weights, stages in ((FP8_BLOCK, 4), (PACKED_MXFP4, 8 if tiles_per_cluster > 4 else 0)):
        step = plan_layer(LayerSpec(MoeShape(6, 4096, channels, 256, 256), weights=weights), tokens)
        assert isinstance(step, SmallBatchStep)
        assert 6 * tokens * (channels // 128) / step.clusters == tiles_per_cluster
        assert step.stages_before_down == stages


def test_kernels_multiply_as_many_rows_as_plans_count():
    """But for packed weights with bases that differ along K, which are rare."""
    source = (CSRC / "mma/swap_ab.cuh").read_text()
    packed, others = (
        tuple(map(int, re.findall(rf"Width<(\d+), {one_base}>{{}}", source))) for one_base in ("kPacked", "false")
    )
    assert packed == PACKED_FEW_ROWS.padded
    assert (*map(int, re.findall(r"Width<(\d+), kWideTiles>{}", source)), PACKED_WIDE.rows) == PACKED_WIDE.padded
    assert others == FEW_ROWS.padded


@pytest.mark.parametrize(("tokens", "stages"), [(1, 0), (2, 0), (4, 8)])
def test_tiles_of_packed_experts_on_other_ranks_do_not_count(tokens, stages):
    step = plan_layer(LayerSpec(MoeShape(6, 7168, 3072, 48, 384), weights=PACKED_MXFP4), tokens)
    assert isinstance(step, SmallBatchStep)
    assert step.stages_before_down == stages


def test_channels_of_models_are_shared_by():
    shares = {2048: (4, 5), 3072: (3, 4), 4096: (2, 3), 5120: (2, 2), 7168: (2, 2), 8192: (1, 2)}
    assert {hidden: (down_splits(hidden, 64), down_splits(hidden, 80)) for hidden in shares} == shares


def test_more_blocks_share_channels_of_packed_experts():
    steps = [
        plan_layer(LayerSpec(MoeShape(6, 4096, 256, 256, 256), weights), 1) for weights in (FP8_BLOCK, PACKED_MXFP4)
    ]
    assert [step.down_splits for step in steps if isinstance(step, SmallBatchStep)] == [2, 3]


def test_few_tiles_go_to_one_cluster_more():
    assert [gate_up_clusters(tiles, 132, 4) for tiles in (1, 33, 99, 100)] == [1, 33, 33, 31]
    assert [gate_up_clusters(tiles, 132, 8) for tiles in (1, 15, 16, 48, 49, 500)] == [1, 15, 16, 16, 15, 15]


def test_tiles_are_short_up_to_40_rows_an_expert():
    steps = [sorted_step(QWEN3_30B, tokens) for tokens in (17, 640, 641)]
    assert [step.tile for step in steps] == [FEW_ROWS, FEW_ROWS, MANY_ROWS]
    assert [step.tile.streams_weights for step in steps] == [True, True, False]


@pytest.mark.parametrize(
    ("shape", "tokens", "choices"),  # gathers, k_splits, pdl_down, keep_b
    [
        (MoeShape(8, 7168, 2048, 4, 256), 20, (True, 2, True, False)),
        (QWEN3_30B, 4096, (True, 1, True, False)),
        (DEEPSEEK_V3, 4096, (False, 1, True, False)),
        (DEEPSEEK_V3_TP8, 4096, (True, 1, True, False)),
        (DEEPSEEK_V3_TP8, 8192, (True, 1, True, True)),
        (MoeShape(8, 7168, 512, 256, 256), 8192, (True, 1, False, False)),
    ],
)
def test_longer_steps_of_models_take_what_was_measured(shape, tokens, choices):
    step = sorted_step(shape, tokens)
    assert (step.gathers, step.k_splits, step.pdl_down, step.keep_b) == choices


@pytest.mark.parametrize(
    ("tokens", "intermediate", "local", "gathers"),
    [(682, 1024, 256, True), (683, 1024, 256, False), (1366, 512, 32, False), (1365, 512, 32, True)],
)
def test_packed_experts_of_many_channels_read_copies(tokens, intermediate, local, gathers):
    """By the rows of each expert of all ranks; tokens that arrive quantized are copied by another kernel."""
    spec = LayerSpec(MoeShape(6, 4096, intermediate, local, 256), weights=PACKED_MXFP4)
    steps = [plan_layer(each, tokens) for each in (spec, spec._replace(quantized=True))]
    assert [step.tile for step in steps] == [PACKED_FEW_ROWS] * 2
    assert [step.gathers for step in steps] == [gathers] * 2
    assert steps[1].quantize == (None if gathers else permute_key())


@pytest.mark.parametrize(("n", "k", "columns"), [(7168, 128, 8), (7168, 256, 4), (2048, 768, 2), (7168, 2048, 1)])
def test_a_block_takes_several_columns_where_k_is_short(n, k, columns):
    assert columns_at_once(4096, 256, n, k) == columns
    assert columns_at_once(4096, 256, 200, k) <= 2


def test_masked_gemm_tiles_follow_the_expected_rows():
    plans = [plan_grouped(BY_COUNTS, 32 * 128, 32, 4096, 7168, expected_m, 132) for expected_m in (1, 40, 41)]
    assert [plan.tile for plan in plans] == [FEW_ROWS, FEW_ROWS, MANY_ROWS]
