"""The plan of a checkpoint is closed: no step of any length on any supported split launches a kernel outside of it."""

from collections.abc import Iterator

import pytest

from fp8moe_plugin.checkpoint.shapes import Model, Parallel, rank_shapes, split_refusal
from fp8moe_plugin.layers.unquantized import is_quantized
from fp8moe_plugin.plan import (
    KernelKey,
    Output,
    dense_key,
    down_small_batch_key,
    gate_up_cluster,
    gate_up_small_batch_key,
    grouped_key,
    linear_kernels,
    model_kernels,
    moe_block_m,
    moe_kernels,
    small_batch,
)
from tests.warmup.conftest import MODELS

LONGEST = 65_536
PARALLEL = [Parallel(tp) for tp in (1, 2, 4, 8)] + [Parallel(8 // dp, dp, True) for dp in (1, 2, 4, 8)]
SMS = (132, 114, 78)  # of an H100 or H200, an H100 PCIe, an H20


def expert_gemms(topk: int, experts: int) -> set[KernelKey]:
    """Of every step up to the longest."""
    blocks = {moe_block_m(tokens, topk, experts) for tokens in range(1, LONGEST + 1)}
    return {grouped_key(block_m, keep_b) for block_m in blocks for keep_b in (False, True)}


def small_batches(model: Model, way: Parallel) -> set[KernelKey]:
    local = rank_shapes(model, way).experts
    sizes = local.topk, local.hidden, local.intermediate, local.experts, model.experts.experts
    widths = {small_batch(tokens, *sizes) for tokens in range(1, 257)} - {0}
    assert widths, "no model is without"
    kinds = [(width, gate_up_cluster(width, local.hidden)) for width in widths]
    return {gate_up_small_batch_key(model.ue8m0, *kind) for kind in kinds} | {down_small_batch_key(*k) for k in kinds}


def dense_gemms(n: int) -> set[KernelKey]:
    return {dense_key(m, n, k, Output.BF16, sms) for sms in SMS for k in (128, 7168) for m in range(1, LONGEST + 1)}


def splits(model: Model) -> Iterator[Parallel]:
    return (way for way in PARALLEL if split_refusal(model, way) is None)


def test_what_is_planned_is_what_loading_an_unquantized_checkpoint_quantizes(models: dict[str, Model]) -> None:
    names = {layer.name for model in models.values() for layer in model.dense}
    assert all(is_quantized(f"model.layers.0.{name}") for name in (*names, "mlp.experts"))


def test_every_step_of_every_split_of_every_model_is_in_its_plan(models: dict[str, Model]) -> None:
    assert all(any(splits(model)) for model in models.values())
    widths = {sum(layer.outputs) for m in models.values() for way in splits(m) for layer in rank_shapes(m, way).dense}
    dense = {n: dense_gemms(n) for n in widths}
    experts = {pair: expert_gemms(*pair) for pair in {(m.experts.topk, m.experts.experts) for m in models.values()}}
    for model in models.values():
        plan = set(model_kernels(model))
        assert experts[model.experts.topk, model.experts.experts] <= plan
        for way in splits(model):
            assert small_batches(model, way) <= plan
            for layer in rank_shapes(model, way).dense:
                assert dense[sum(layer.outputs)] <= plan


@pytest.mark.parametrize("name", MODELS)
def test_what_the_layers_load_is_the_plan(models: dict[str, Model], name: str) -> None:
    """`test_plan.py` holds against these lists what the ops launch."""
    model = models[name]
    layers = [*linear_kernels(model.ue8m0), *moe_kernels(model.ue8m0, False), *moe_kernels(model.ue8m0, True)]
    assert set(model_kernels(model)) == set(layers)
    assert len(model_kernels(model)) <= 60
