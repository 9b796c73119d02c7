"""The specs of a model's experts."""

from dataclasses import replace

from fp8moe_plugin.checkpoint.shapes import Experts, Model
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape

EXPERTS = Experts(layers=2, experts=8, topk=2, hidden=256, intermediate=128)
MODEL = Model("Some", EXPERTS, dense=(), heads=1, kv_heads=1, vocab=1, ue8m0=True, quantized=True)
SHAPE = MoeShape(2, 256, 128, 8, 8)


def test_a_model_has_a_spec_for_each_activation() -> None:
    assert model_specs(MODEL, SHAPE) == [LayerSpec(SHAPE, ue8m0=True)]
    activations = SILU, Activation(limit=7.0)
    found = model_specs(replace(MODEL, activations=activations), SHAPE)
    assert found == [LayerSpec(SHAPE, ue8m0=True, activation=activation) for activation in activations]
