"""The kernels listed for a checkpoint are those that its layers load, each with a reason."""

from dataclasses import replace

import pytest

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.launches.kernel_sets import model_kernels
from fp8moe_plugin.launches.sm90 import Sm90
from fp8moe_plugin.layers.unquantized import is_quantized
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.plan.sm90.catalog import PACKED_FORMATS
from fp8moe_plugin.plan.sm90.kernel_sets import batched_dense_kernels
from fp8moe_plugin.plan.spec import Arrival, LayerSpec
from tests import helpers as h
from tests.checkpoint.published import SERVED


def test_what_is_planned_is_what_loading_an_unquantized_checkpoint_quantizes(models: dict[str, Model]) -> None:
    names = {layer.name for model in models.values() for layer in model.dense}
    names = {name for name in names if name.startswith(("mlp.", "self_attn."))}  # others are FP8 in checkpoints alone
    assert all(is_quantized(f"model.layers.0.{name}") for name in (*names, "mlp.experts"))


def test_each_kernel_has_a_reason_of_its_own(models: dict[str, Model]) -> None:
    reasons = list(model_kernels(models["DeepSeek-V3"]).values())
    assert len(reasons) == len(set(reasons))


def test_prefill_begins_where_wide_tiles_end(models: dict[str, Model]) -> None:
    reasons = " ".join(model_kernels(models["DeepSeek-V4-Flash"]).values())
    assert "in steps of 2561 to 4266 tokens" in reasons
    assert "in steps of more than 4266 tokens: prefill" in reasons
    assert "more than 2560" not in reasons


@pytest.mark.parametrize("name", SERVED)
def test_what_the_layers_load_is_the_plan(models: dict[str, Model], name: str) -> None:
    """tests/plan compares what is launched with these lists."""
    model = models[name]
    assert set(model_kernels(model)) == h.loaded_kernels(model)


@pytest.mark.parametrize("name", SERVED)
def test_a_model_loads_few_kernels(models: dict[str, Model], name: str) -> None:
    model = models[name]
    forms = [model, *[replace(model, weights=FP8_BLOCK)] * (model.weights in PACKED_FORMATS)]  # FP8MOE_FP4_EXPERTS
    for form in forms:
        assert len(h.loaded_kernels(form, arrivals=set(Arrival) - {Arrival.PUSHED})) <= 38
        assert len(model_kernels(form)) <= 44


@pytest.mark.parametrize("target", [SM90, "sm_89"])
def test_a_model_has_the_kernels_of_each_activation(models: dict[str, Model], target: str) -> None:
    def kernels(*activations: Activation) -> set[KernelKey]:
        return set(model_kernels(replace(models["DeepSeek-V3"], activations=activations), target))

    plain, modified = kernels(SILU), kernels(Activation("swiglustep", 7.0))
    assert kernels(SILU, Activation("swiglustep", 7.0)) == plain | modified
    assert plain - modified
    assert modified == kernels(Activation(limit=10.0))  # numbers are arguments


def test_rows_that_no_kernel_takes_have_none(monkeypatch: pytest.MonkeyPatch, models: dict[str, Model]) -> None:
    def refusal(backend: Sm90, spec: LayerSpec, arrival: Arrival) -> str | None:
        return "rows that are sorted" if arrival is Arrival.BATCHED else None

    model = models["DeepSeek-V3"]
    batched = set(model_kernels(model))
    monkeypatch.setattr(Sm90, "refusal", refusal)
    assert {key.source for key in batched - set(model_kernels(model))} == {"tiles_of_counts"}


def test_a_batched_layer_has_kernels_of_its_own(models: dict[str, Model]) -> None:
    model = models["DeepSeek-V3"]
    batched = replace(model, dense=(*model.dense, replace(model.dense[0], groups=8)))
    assert {key.source for key in set(model_kernels(batched)) - set(model_kernels(model))} == {"transpose_scales"}
    assert set(batched_dense_kernels()) <= set(model_kernels(batched))
