"""SGLang's layers compute the computed cells of the table, and refuse each other one with a message."""

import re

import pytest

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.layers.sglang.refusals import activation
from tests.layers.conformance import (
    CELLS,
    CHECKPOINTS,
    CLAMPED,
    COMPUTED,
    INTERMEDIATE,
    OAI,
    REFUSED,
    STEP,
    Cell,
    assert_computed,
    make_call,
)
from tests.layers.sglang import layers

pytestmark = pytest.mark.seam


LIMITED = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
FIELDS: dict[Activation, dict[str, object]] = {
    SILU: {},
    Activation("gelu"): {"activation": "gelu"},
    Activation("swigluoai", 7.0, 1.702, 1.0): LIMITED,
    CLAMPED: {"swiglu_limit": CLAMPED.limit},
    OAI: LIMITED | {"gate_up_interleaved": False},
    STEP: {"gemm1_clamp_limit": 7.0},
}


def layer_of(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> layers.Layer:
    monkeypatch.setattr(layers.QUANT, "spec", cell.quant)
    return layers.Layer(INTERMEDIATE, 1, 0, bias=cell.bias, **FIELDS[cell.activation])


@pytest.mark.parametrize("expected", FIELDS, ids=str)
def test_the_activation_that_a_runner_describes(expected):
    assert activation(layers.MoeRunnerConfig(**FIELDS[expected])) == expected


@pytest.mark.parametrize("cell", [cell for cell in COMPUTED if not cell.bias], ids=str)
def test_a_layer_computes(monkeypatch, cell):
    call = make_call(cell)
    layer = layer_of(cell, monkeypatch).load(call.checkpoint)
    assert_computed(layers.called(layer, call.x, call.weights, call.ids), call)


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if cell.activation in FIELDS and (cell.bias or cell in REFUSED)], ids=str
)
def test_a_layer_is_refused(monkeypatch, cell):
    if cell.bias:  # which SGLang's models load from one tensor for all experts
        message = "L: the model's experts have a bias or are stored in one tensor for all"
    else:
        message = re.escape(f"L: the model's experts have {cell.activation.refusal or cell.refusal}, which the")
    with pytest.raises(UnsupportedError, match=message):
        layer_of(cell, monkeypatch).load(CHECKPOINTS[cell.weights]).finish()
