"""The kernels listed for a checkpoint are complete: no step on any supported split launches another one."""

from collections.abc import Iterator

import pytest

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model, merges_shared_expert, rank_shapes, split_refusal
from fp8moe_plugin.launches.kernel_sets import model_kernels
from fp8moe_plugin.layers.unquantized import is_quantized
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.constants import FEW_ROWS_TILE, MANY_ROWS_TILE
from fp8moe_plugin.plan.sm90.dense import plan_dense
from fp8moe_plugin.plan.sm90.grouped import grouped_key
from fp8moe_plugin.plan.sm90.kernel_sets import indexer_kernels
from fp8moe_plugin.plan.sm90.layer import few_rows_tokens
from fp8moe_plugin.plan.spec import MoeShape, Output
from tests import faults
from tests import helpers as h
from tests.warmup.conftest import MODELS

LONGEST = 65_536
PARALLEL = [Parallel(tp) for tp in (1, 2, 4, 8)] + [Parallel(8 // dp, dp, 8) for dp in (1, 2, 4, 8)]
SMS = (132, 114, 78)  # H100 SXM and H200, H100 PCIe, H20


def steps(model: Model, way: Parallel) -> set[KernelKey]:
    """The kernels of both GEMMs, for every short step, and for longer ones on both sides of each threshold."""
    shape = MoeShape.of(rank_shapes(model, way).experts, model.experts.experts)
    if merges_shared_expert(model, way):
        shape = shape.with_shared_expert()
    few = few_rows_tokens(shape.topk, shape.global_experts)
    tokens = {*range(1, 257), few, few + 1, *(2**i for i in range(8, LONGEST.bit_length()))}
    plans = [h.plan_step(shape, count, model.ue8m0, sms) for count in tokens for sms in SMS]
    return {key for plan in plans for key in (plan.gate_up, plan.down)}


def dense_gemms(n: int) -> set[KernelKey]:
    """The kernels for every number of rows; without FULL_COUNTS, above 256 only on both sides of multiples of 64."""
    rows = [m for m in range(1, LONGEST + 1) if faults.FULL or m <= 256 or m % 64 <= 1]
    plans = (plan_dense(m, n, k, Output.BF16, sms) for sms in SMS for k in (128, 7168) for m in rows)
    return {plan.kernel for plan in plans}


def splits(model: Model) -> Iterator[Parallel]:
    return (way for way in PARALLEL if split_refusal(model, way) is None)


def test_what_is_planned_is_what_loading_an_unquantized_checkpoint_quantizes(models: dict[str, Model]) -> None:
    names = {layer.name for model in models.values() for layer in model.dense}
    assert all(is_quantized(f"model.layers.0.{name}") for name in (*names, "mlp.experts"))


def test_every_step_of_every_split_of_every_model_is_in_its_plan(models: dict[str, Model]) -> None:
    assert all(any(splits(model)) for model in models.values())
    widths = {sum(layer.outputs) for m in models.values() for way in splits(m) for layer in rank_shapes(m, way).dense}
    dense = {n: dense_gemms(n) for n in widths}
    grouped = {grouped_key(MANY_ROWS_TILE, keep_b) for keep_b in (False, True)} | {grouped_key(FEW_ROWS_TILE)}
    for model in models.values():
        plan = set(model_kernels(model))
        assert grouped <= plan
        for way in splits(model):
            assert steps(model, way) <= plan
            for layer in rank_shapes(model, way).dense:
                assert dense[sum(layer.outputs)] <= plan


def test_each_kernel_has_a_reason_of_its_own(models: dict[str, Model]) -> None:
    reasons = list(model_kernels(models["DeepSeek-V3"]).values())
    assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize("name", MODELS)
def test_what_the_layers_load_is_the_plan(models: dict[str, Model], name: str) -> None:
    """tests/plan/test_launches.py compares what the ops launch with these lists."""
    model = models[name]
    layers = [*h.linear_kernels(model.ue8m0), *h.moe_kernels(model.ue8m0, False), *h.moe_kernels(model.ue8m0, True)]
    indexer = indexer_kernels(64) if name == "DeepSeek-V3.2-Exp" else []
    assert set(model_kernels(model)) == {*layers, *indexer}
    assert len(model_kernels(model)) <= 60
