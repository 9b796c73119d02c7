"""What a step's plan chooses, and for which models."""

import pytest

from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.ops.grouped_gemm import BY_COUNTS
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.catalog import (
    MULTIPROCESSOR_SMEM_BYTES,
    SMALL_BATCH_STAGES,
    SMALL_BATCH_TOKENS,
    down_small_batch_key,
    gate_up_small_batch_key,
    grouped_gemm_key,
)
from fp8moe_plugin.plan.sm90.constants import FEW_ROWS_TILE, MANY_ROWS_TILE, MAX_CLUSTER_SPLITS
from fp8moe_plugin.plan.sm90.grouped import columns_at_once, down_uses_pdl, keeps_b, plan_batched, plan_grouped
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep, down_splits, gate_up_clusters, k_splits
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape, Output
from fp8moe_plugin.plan.tuning import (
    DOWN_BLOCKS,
    EARLY_BELOW,
    EARLY_FROM,
    GATHER_UP_TO,
    KEEP_B_UP_TO,
    MULTIPROCESSORS,
    SPLIT_BYTES,
)
from tests import helpers as h

WIDE = GATHER_UP_TO + 128
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


def test_a_small_batch_is_one_of_few_tokens_and_few_bytes():
    for shape in (DEEPSEEK_V3_TP8, QWEN3_30B, DEEPSEEK_V3_EP8):
        assert [padded_tokens(shape, tokens) for tokens in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 0]
    assert [padded_tokens(DEEPSEEK_V3, tokens) for tokens in (1, 2, 3)] == [8, 8, 0]
    assert padded_tokens(MoeShape(33, 128, 128, 4, 4), 8) == padded_tokens(MoeShape(8, 8192 + 128, 128, 4, 4), 1) == 0


def test_a_shared_expert_leaves_the_choice_of_a_small_batch_as_it_is():
    """16 tokens are 144 pairs then, of the 176 that fit."""
    for shape in (DEEPSEEK_V3_TP8, DEEPSEEK_V3):
        merged = shape.with_shared_expert()
        assert merged == MoeShape(9, 7168, shape.intermediate, 257, 257)
        assert [padded_tokens(merged, n) for n in range(1, 18)] == [padded_tokens(shape, n) for n in range(1, 18)]


def test_a_wide_small_batch_needs_long_parts_of_k():
    assert [padded_tokens(MoeShape(8, hidden, 256, 128, 128), 9) for hidden in (1920, 2048)] == [0, 16]


@pytest.mark.parametrize("kind", SMALL_BATCH_STAGES)
def test_a_multiprocessor_has_room_for_a_block_of_the_first_gemm_of_a_small_batch_and_another(kind):
    first, second = gate_up_small_batch_key(False, *kind), down_small_batch_key(*kind)
    for pair in (first, first), (first, second):
        assert sum(key.smem_bytes + 1024 for key in pair) <= MULTIPROCESSOR_SMEM_BYTES
        assert sum(key.threads for key in pair) <= 2048


@pytest.mark.parametrize("padded_tokens", SMALL_BATCH_TOKENS)
@pytest.mark.parametrize("hidden", [128, 1024, 2048, 3072, 4096, 5120, 7168, 8192])
def test_the_second_gemm_has_enough_blocks_and_no_more_than_multiprocessors(hidden, padded_tokens):
    splits = down_splits(hidden, padded_tokens)
    assert hidden // 128 * splits <= MULTIPROCESSORS
    assert splits == MAX_CLUSTER_SPLITS or hidden // 128 * splits >= DOWN_BLOCKS[padded_tokens]


def test_channels_of_models_are_shared_by():
    shares = {2048: (4, 5), 3072: (3, 4), 4096: (2, 3), 5120: (2, 2), 7168: (2, 2), 8192: (1, 2)}
    assert {hidden: (down_splits(hidden, 8), down_splits(hidden, 16)) for hidden in shares} == shares


def test_few_tiles_go_to_one_cluster_more():
    assert [gate_up_clusters(tiles, 132, 4) for tiles in (1, 33, 99, 100)] == [1, 33, 33, 31]
    assert [gate_up_clusters(tiles, 132, 8) for tiles in (1, 15, 16, 48, 49, 500)] == [1, 15, 16, 16, 15, 15]


def test_tiles_are_short_up_to_40_rows_an_expert():
    steps = [sorted_step(QWEN3_30B, tokens) for tokens in (17, 640, 641)]
    assert [step.tile_rows for step in steps] == [FEW_ROWS_TILE, FEW_ROWS_TILE, MANY_ROWS_TILE]
    assert [step.few_rows for step in steps] == [True, True, False]


def test_wide_experts_of_long_steps_read_copies_of_their_tokens():
    for tokens, wide, gathers in ((20, WIDE, True), (1000, GATHER_UP_TO, True), (1000, WIDE, False)):
        assert sorted_step(MoeShape(8, 2048, wide, 128, 128), tokens).gathers is gathers


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("intermediate", [128, 256, 384, EARLY_FROM, WIDE])
def test_the_second_gemm_keeps_weights_of_narrow_experts_with_many_rows_over_all_ranks(intermediate, ranks):
    shape = MoeShape(2, 256, intermediate, 4, 4 * ranks)
    enough = EARLY_BELOW * ranks * 4 // 2
    for tokens in (enough - 1, enough):
        step = sorted_step(shape, tokens)
        assert step.keep_b == (intermediate <= KEEP_B_UP_TO and tokens == enough)
        assert step.down == grouped_gemm_key(Output.BF16, keep_b=step.keep_b)
        assert step.pdl_down == (intermediate >= EARLY_FROM or tokens < enough or step.keep_b)


def test_the_second_gemm_starts_early_except_where_narrow_experts_have_many_rows():
    for intermediate in (128, 256, EARLY_FROM - 128, EARLY_FROM, WIDE):
        for rows in (1, EARLY_BELOW - 1, EARLY_BELOW, 10_000):
            kept = keeps_b(rows, intermediate)
            assert kept == (intermediate <= 256 and rows >= EARLY_BELOW)
            assert down_uses_pdl(rows, intermediate) == (intermediate >= EARLY_FROM or rows < EARLY_BELOW or kept)
            plan = plan_batched(LayerSpec(MoeShape(1, 128, intermediate, 4, 4)), 8, rows)
            assert plan.pdl_down == down_uses_pdl(rows, intermediate)
            assert plan.down == grouped_gemm_key(Output.BF16, keep_b=kept)


@pytest.mark.parametrize("hidden", [128, 2048, 5120, 7168])
@pytest.mark.parametrize("intermediate", [128, 256, 2048])
def test_k_is_split_while_parts_fit_a_gpu_and_sums_are_few_bytes(hidden, intermediate):
    before, shape = 8, MoeShape(8, hidden, intermediate, 256, 256)
    for rows in (1, 8, 64, 500, 512, 8192, 16384):
        splits = k_splits(rows, shape)
        assert hidden // 128 % splits == 0
        assert splits == 1 or 8 * rows * intermediate * splits <= SPLIT_BYTES
        assert splits <= before, "more rows never need more splits"
        assert splits == 1 or splits * min(rows, 256) * intermediate // 128 <= MULTIPROCESSORS
        before = splits
    assert k_splits(8, DEEPSEEK_V3_TP8) == 8


@pytest.mark.parametrize(("n", "k", "columns"), [(7168, 128, 8), (7168, 256, 4), (2048, 768, 2), (7168, 2048, 1)])
def test_a_block_takes_several_columns_where_k_is_short(n, k, columns):
    assert columns_at_once(4096, 256, n, k) == columns
    for rows in (1, 3, 8, 64):
        fewer = columns_at_once(rows, 256, n, k)
        assert n // 128 % fewer == 0
        assert fewer == 1 or rows * (n // 128 // fewer) >= MULTIPROCESSORS * 3 // 4
    assert columns_at_once(4096, 256, 200, k) <= 2


def test_tiles_of_a_masked_gemm_are_as_long_as_its_groups_are_expected_to_be():
    plans = [plan_grouped(BY_COUNTS, 32 * 128, 32, 4096, 7168, expected_m, 132) for expected_m in (1, 40, 41)]
    assert [plan.tile_rows for plan in plans] == [FEW_ROWS_TILE, FEW_ROWS_TILE, MANY_ROWS_TILE]
