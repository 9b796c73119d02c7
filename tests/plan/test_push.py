"""The plan of steps whose tokens the ranks store into each other's windows."""

from typing import Any

import pytest

from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.launches.operands import LAYER_SLOTS
from fp8moe_plugin.launches.sm90.push import push_launches
from fp8moe_plugin.plan.gpu_tuning import UNTUNED, GpuTuning
from fp8moe_plugin.plan.sm90.catalog import add_rows_key
from fp8moe_plugin.plan.sm90.kernel_sets import layer_kernels
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep, SortedStep, plan_layer
from fp8moe_plugin.plan.sm90.push import plan_push, pushes_rows, window_layout
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from fp8moe_plugin.plan.tuning import GATHER_UP_TO, MULTIPROCESSORS


def test_ranks_with_unequal_shares_agree_on_the_format() -> None:
    ranks, rows = 3, 4
    specs = [LayerSpec(MoeShape(4, 8192, 171 * 128, local, 256)) for local in (85, 86)]
    assert len({type(plan_layer(spec, ranks * rows)) for spec in specs}) == 2, "alone they would differ"
    fewer, more = (plan_push(spec, ranks, rows, MULTIPROCESSORS) for spec in specs)
    assert fewer.push_tokens == more.push_tokens
    assert not any(isinstance(step.layer, SmallBatchStep) for step in (fewer, more))


V3, FLASH = LayerSpec(MoeShape(8, 7168, 2048, 64, 256)), LayerSpec(MoeShape(6, 4096, 2048, 64, 256))


@pytest.mark.parametrize(
    ("spec", "ranks", "rows", "by_rows"),
    [
        (V3, 4, 320, False),  # 40 rows per expert: the kernel for few rows
        (V3, 4, 321, True),
        (V3, 4, 3200, True),  # 400 rows per expert
        (V3, 4, 3201, False),
        (V3, 8, 1600, True),
        (V3, 8, 1601, False),
        (V3, 3, 2048, False),
        (FLASH, 4, 512, True),
        (FLASH, 4, 4096, True),
        (FLASH, 2, 4096, False),
        (FLASH._replace(shape=FLASH.shape._replace(intermediate=1152)), 4, 2048, True),
        (FLASH._replace(shape=FLASH.shape._replace(intermediate=1024)), 4, 2048, False),  # GEMM 1 gathers tokens
        (FLASH._replace(weights=FP8_CHANNEL), 4, 2048, False),
        (FLASH._replace(weights=PACKED_MXFP4), 4, 2048, False),
        (FLASH._replace(bias=True), 4, 2048, False),
        (FLASH._replace(batch_invariant=True), 4, 2048, False),  # in short steps tokens have sums
    ],
)
def test_steps_push_rows_where_that_was_faster(spec: LayerSpec, ranks: int, rows: int, by_rows: bool) -> None:
    step = plan_push(spec, ranks, rows, MULTIPROCESSORS)
    assert step.pushes_rows == getattr(step.layer, "pushes_rows", False) == by_rows
    assert (step.add == add_rows_key()) == by_rows
    assert (("PUSHED", 1) in step.layer.down.defines) == by_rows


@pytest.mark.parametrize("rows", [320, 321, 3200, 3201])
@pytest.mark.parametrize("tuning", [UNTUNED, GpuTuning(few_rows_per_expert=39)])
def test_ranks_that_differ_agree_on_rows_or_sums(rows: int, tuning: GpuTuning) -> None:
    """In their numbers of experts and of multiprocessors."""
    steps = {
        plan_push(V3._replace(shape=V3.shape._replace(local_experts=local)), 4, rows, multiprocessors, tuning).add
        for local in (63, 64)
        for multiprocessors in (114, MULTIPROCESSORS)
    }
    assert len(steps) == 1


def test_a_step_that_pushes_rows_keeps_none() -> None:
    layer = plan_push(V3, 4, 2048, MULTIPROCESSORS).layer
    assert isinstance(layer, SortedStep)
    assert not layer.gathers, "rows have pairs in place of tokens"
    assert layer.scratch.down == layer.scratch.nbytes, "no rows are here"


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"weights": FP8_CHANNEL},
        {"weights": PACKED_MXFP4},
        {"bias": True},
        {"batch_invariant": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("intermediate", [256, 2048])
def test_the_kernels_of_each_step_are_listed(form: dict[str, Any], intermediate: int) -> None:
    spec = LayerSpec(MoeShape(6, 4096, intermediate, 64, 256), **form)
    launched = set()
    for rows in (1, 20, 1000, 3000, 5000):
        step, layout = plan_push(spec, 4, rows, MULTIPROCESSORS), window_layout(4, rows, 4096, 6, 256)
        owners, window = (Slot(len(LAYER_SLOTS) + i) for i in range(2))
        launched |= {launch.key for launch in push_launches(step, LAYER_SLOTS, owners, window, layout, rows, False)}
    assert launched <= set(layer_kernels(spec, Arrival.PUSHED))
    assert (add_rows_key() in launched) == (not form and intermediate > GATHER_UP_TO)


@pytest.mark.parametrize("spec", [V3, FLASH])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_windows_have_room_for_sums_and_rows(spec: LayerSpec, ranks: int) -> None:
    """For sums of any step, because layers of other formats push no rows."""
    topk, hidden, _, _, experts = spec.shape
    for most in (500, 4000, 8192):
        layout = window_layout(ranks, most, hidden, topk, experts)
        stored = [topk * rows for rows in range(1, most + 1) if pushes_rows(spec, ranks, rows)]
        assert layout.nbytes - layout.sums == 2 * max(ranks * most, *stored, 0) * hidden


@pytest.mark.parametrize("rows", [1, 4, 500])
def test_ranks_with_other_further_steps_agree_on_the_format(rows: int) -> None:
    alone = LayerSpec(MoeShape(6, 4096, 256, 32, 256), PACKED_MXFP4)
    without, with_steps = (plan_push(alone._replace(further_steps=(0, n)), 8, rows, MULTIPROCESSORS) for n in (0, 1))
    assert isinstance(plan_layer(alone, 8), SmallBatchStep), "without a group, few tokens are a small batch"
    assert without.push_tokens == with_steps.push_tokens
    assert not any(isinstance(step.layer, SmallBatchStep) for step in (without, with_steps))
