"""SGLang's layers compute the computed cells of the table, and refuse each other one with a message."""

import pytest

pytest.importorskip("sglang", reason="needs SGLang (make sglang)")

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import SILU
from fp8moe_plugin.formats.spec import QuantSpec
from tests.layers.conformance import CHECKPOINTS, COMPUTED, INTERMEDIATE, REFUSED, Cell, assert_computed, make_call
from tests.layers.sglang import layers

pytestmark = pytest.mark.seam


FIELDS = {"kind": "activation", "limit": "gemm1_clamp_limit", "alpha": "gemm1_alpha", "beta": "gemm1_beta"}


def layer_of(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> layers.Layer:
    monkeypatch.setattr(layers.QUANT, "spec", QuantSpec(cell.weights))
    changed = {FIELDS[name]: value for name, value in cell.changed.items()}
    if not changed.keys() <= layers.MoeRunnerConfig.__dataclass_fields__.keys():
        pytest.skip(f"this SGLang lacks one of {', '.join(changed)}")
    return layers.Layer(INTERMEDIATE, 1, 0, bias=cell.bias, **changed)


@pytest.mark.parametrize("cell", COMPUTED, ids=str)
def test_a_layer_computes(monkeypatch, cell):
    call = make_call(cell)
    layer = layer_of(cell, monkeypatch).load(call.checkpoint)
    assert_computed(layers.called(layer, call.x, call.weights, call.ids), call)


@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_a_layer_is_refused(monkeypatch, cell):
    message = f"L: the model's experts have {cell.refusal}, which the"
    if cell.bias:
        message = "L: the model's experts have a bias or are stored in one tensor for all"
    elif cell.activation != SILU:
        message = rf"L: .* another activation than SiLU \({cell.activation.kind}\), or a modified or clamped SwiGLU"
    with pytest.raises(UnsupportedError, match=message):
        layer_of(cell, monkeypatch).load(CHECKPOINTS[cell.weights]).finish()
