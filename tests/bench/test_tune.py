"""The thresholds that are chosen from measured times. The times here are made up."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
import torch

from fp8moe_plugin.bench import tune
from fp8moe_plugin.bench.tune import LAYERS, THRESHOLDS
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.launches.backend import Plan
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.gpu_tuning import OF_GPUS, UNTUNED, GpuTuning
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, PACKED_FEW_ROWS

SMS = 132
QWEN3 = "Qwen3-30B-A3B"
PREFIXES = {FP8_BLOCK: "", PACKED_MXFP4: "packed_"}  # of the thresholds of a format


def tuned(us: Callable[[str, int, object], float], default: GpuTuning = UNTUNED) -> tune.Tuned:
    """Returns the tuning for a GPU; `us`: microseconds of a step of a layer by a plan."""

    def clock(name: str, tokens: int, plans: Sequence[Plan]) -> list[float]:
        return [us(name, tokens, plan.choices) for plan in plans]

    return tune.tune(LAYERS, SMS, default, clock, lambda line: None)


def rows_per_expert(name: str, tokens: int) -> int:
    shape = LAYERS[name].shape
    return round(tokens * shape.topk / shape.global_experts)


def is_few(plan: object) -> bool:
    return not isinstance(plan, SmallBatchStep) and plan.tile in (FEW_ROWS, PACKED_FEW_ROWS)


def test_each_threshold_has_steps_and_its_default() -> None:
    assert {threshold.field for threshold in THRESHOLDS} == asdict(UNTUNED).keys()
    for threshold, default in itertools.product(THRESHOLDS, (UNTUNED, *OF_GPUS.values())):
        assert getattr(default, threshold.field) in threshold.values
        ends = [GpuTuning(**{threshold.field: value}) for value in (threshold.values[0], threshold.values[-1])]
        assert any(
            len({BACKENDS[SM90].tuned(end).plan_layer(spec, tokens, SMS).choices for end in ends}) == 2
            for spec in LAYERS.values()
            for tokens in threshold.steps(spec.shape)
        )


@pytest.mark.parametrize("default", [UNTUNED, *OF_GPUS.values()])
def test_times_that_do_not_differ_leave_the_defaults(default: GpuTuning) -> None:
    found = tuned(lambda name, tokens, plan: float(tokens), default)
    assert found.tuning == default
    assert found.steps == 102
    assert found.changed == []


def test_noise_leaves_the_defaults() -> None:
    gen = random.Random(0)
    assert tuned(lambda name, tokens, plan: tokens * gen.uniform(0.996, 1.004)).tuning == UNTUNED


@pytest.mark.parametrize("most", [4, 24, 66, 128])
@pytest.mark.parametrize("weights", [FP8_BLOCK, PACKED_MXFP4])
def test_the_crossover_of_few_and_many_rows_is_found(weights: WeightFormat, most: int) -> None:
    def us(name: str, tokens: int, plan: object) -> float:
        if LAYERS[name].weights is not weights or isinstance(plan, SmallBatchStep):
            return 90
        return 90 if is_few(plan) == (rows_per_expert(name, tokens) <= most) else 100

    found, field = tuned(us), f"{PREFIXES[weights]}few_rows_per_expert"
    assert found.tuning == GpuTuning(**{field: most})
    changed = {(step.layer, rows_per_expert(step.layer, step.tokens)) for step in found.changed}
    between = {rows for rows in tune.ROWS if (rows <= most) != (rows <= getattr(UNTUNED, field))}
    assert changed == {(name, rows) for name in LAYERS if LAYERS[name].weights is weights for rows in between}
    assert all((step.default_us, step.us) == (100, 90) for step in found.changed)


@pytest.mark.parametrize(("weights", "mib"), [*((FP8_BLOCK, mib) for mib in (0, 256, 2048)), (PACKED_MXFP4, 256)])
def test_the_bytes_of_small_batches_are_found(weights: WeightFormat, mib: int) -> None:
    def us(name: str, tokens: int, plan: object) -> float:
        spec = LAYERS[name]
        nbytes = weights.weight.nbytes(3 * spec.shape.intermediate, spec.shape.hidden) * tokens * spec.shape.topk
        right = isinstance(plan, SmallBatchStep) == (nbytes <= mib << 20)
        return 90 if right or spec.weights is not weights else 100

    assert tuned(us).tuning == GpuTuning(**{f"{PREFIXES[weights]}small_batch_bytes": mib << 20})


def test_a_gain_for_one_layer_is_not_bought_with_a_loss_of_another() -> None:
    def us(name: str, tokens: int, plan: object) -> float:
        gains = is_few(plan) and 40 < rows_per_expert(name, tokens) <= 64
        return 100 - 20 * gains if name != QWEN3 else 100 + 2 * gains

    assert tuned(us).tuning.few_rows_per_expert == UNTUNED.few_rows_per_expert


def test_clusters_that_find_no_room_are_left_out() -> None:
    def us(name: str, tokens: int, plan: object) -> float:
        if not isinstance(plan, SmallBatchStep):
            return 100
        return 95 if plan.clusters * plan.cluster > SMS - 8 else 98

    assert tuned(us).tuning.spare_multiprocessors == 0


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"needs a Hopper GPU.*torch found no usable GPU"):
        tune.GpuClock(LAYERS)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [FP8_BLOCK, PACKED_MXFP4])
def test_a_gpu_gives_times_of_each_plan(weights: WeightFormat) -> None:
    spec, prefix = LAYERS[QWEN3]._replace(weights=weights), PREFIXES[weights]
    clock = tune.GpuClock({QWEN3: spec})
    no_small_batch = {f"{prefix}small_batch_bytes": 0}
    ends = UNTUNED, GpuTuning(**no_small_batch), GpuTuning(**no_small_batch, **{f"{prefix}few_rows_per_expert": 0})
    plans = [BACKENDS[SM90].tuned(end).plan_layer(spec, 2, clock.multiprocessors) for end in ends]
    times = clock(QWEN3, 2, plans)
    assert all(20 < us < 2000 for us in times), times
