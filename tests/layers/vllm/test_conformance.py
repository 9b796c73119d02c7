"""vLLM's layers compute the computed cells of the table, and refuse each other one with a message."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers.vllm.experts import layer_activation
from tests.layers.conformance import (
    ACTIVATIONS,
    COMPUTED,
    INTERMEDIATE,
    REFUSED,
    STEP,
    Cell,
    assert_computed,
    make_call,
)
from tests.layers.vllm import one_rank


def layer_of(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> one_rank.Layer:
    monkeypatch.setattr(one_rank, "FP8", cell.quant)
    moe = {f"swiglu_{name}": value for name, value in cell.changed.items() if name != "kind"}
    moe |= {"activation": MoEActivation(cell.activation.kind), "has_bias": cell.bias}
    return one_rank.Layer(INTERMEDIATE, 1, 0, moe=moe)


@pytest.mark.seam
@pytest.mark.parametrize("expected", ACTIVATIONS, ids=str)
def test_the_activation_that_a_layer_describes(expected):
    named = {f"swiglu_{name}": value for name, value in expected._asdict().items() if name != "kind"}
    moe = SimpleNamespace(activation=MoEActivation(expected.kind), **named)
    assert layer_activation(moe) == expected
    moe.swiglu_limit = 5.0
    assert layer_activation(moe).limit == (7.0 if expected == STEP else 5.0)  # which its kernel always has


@pytest.mark.parametrize("cell", COMPUTED, ids=str)
def test_a_layer_computes(workspaces, monkeypatch, cell):
    call, layer = make_call(cell), layer_of(cell, monkeypatch)
    layer.load(call.checkpoint)
    with set_current_vllm_config(one_rank.default_config()):
        layer.quant_method.process_weights_after_loading(layer)
    found = layer.quant_method.apply(layer, call.x, call.weights, call.ids, None, None)
    assert_computed(found, call)


@pytest.mark.seam
@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_a_layer_is_refused(monkeypatch, cell):
    message = re.escape(f"L: the model's experts have {cell.refusal}, which the kernels do not support")
    with pytest.raises(UnsupportedError, match=message):
        layer_of(cell, monkeypatch)
