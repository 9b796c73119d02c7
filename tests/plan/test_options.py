"""Options of a layer survive their text, in which torch ops take them, and equal options are one object."""

from dataclasses import fields

import pytest

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.plan import options
from fp8moe_plugin.plan.options import LayerOptions, layer_options, options_of, parse_options
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests.formats.fp4 import FP4

SHAPE = MoeShape(4, 256, 128, 8, 8)
CHANGED = {
    "ue8m0": True,
    "activation": Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0),
    "shared_expert": True,
    "routed_scale": 0.1 + 0.2,
}


@pytest.mark.parametrize("values", [{}, CHANGED, *({name: value} for name, value in CHANGED.items())], ids=str)
def test_options_survive_their_text(values):
    given = layer_options(**values)
    assert given is layer_options(**values)
    parse_options.cache_clear()
    assert parse_options(given.text) is given
    assert given.spec(SHAPE, False) == LayerSpec(SHAPE, **values)
    assert options_of(LayerSpec(SHAPE, **values)) is given


def test_equal_numbers_have_one_text():
    options._only.cache_clear()
    whole = layer_options(ue8m0=1, activation=Activation(limit=7), routed_scale=2)
    assert layer_options(ue8m0=True, activation=Activation(limit=7.0), routed_scale=2.0) is whole
    assert parse_options(whole.text) is whole


def test_zeros_of_both_signs_have_one_text():
    options._only.cache_clear()
    negative = layer_options(activation=Activation(limit=7.0, beta=-0.0), routed_scale=-0.0)
    assert layer_options(activation=Activation(limit=7.0, beta=0.0), routed_scale=0.0) is negative
    assert "-0.0" not in negative.text
    assert parse_options(negative.text) is negative


@pytest.mark.parametrize("wrong", [{"kind": []}, {"limit": "7"}, {"limit": True}, {"alpha": None}, {"beta": 10**5000}])
def test_an_activation_of_other_types_has_no_options(wrong):
    with pytest.raises(InvalidInputError, match=r"activation is .*\. Pass a name and Python numbers"):
        layer_options(activation=Activation(**wrong))


def test_each_field_of_a_spec_is_an_option_or_comes_from_elsewhere():
    from_tensors = {"shape", "further_steps", "quantized", "shared_gate"}
    elsewhere = from_tensors | {"batch_invariant", "bias"}  # the environment; refused before a layer is called
    assert {field.name for field in fields(LayerOptions)} | elsewhere == set(LayerSpec._fields)


def test_a_listed_format_has_a_text(monkeypatch):
    given = layer_options(FP4)
    with pytest.raises(InvalidInputError):
        parse_options(given.text)
    monkeypatch.setattr(options, "FORMATS", (*options.FORMATS, FP4))
    assert parse_options(given.text).weights is FP4
    parse_options.cache_clear()


RIGHT = layer_options().text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        RIGHT.replace(" ", ""),
        RIGHT.replace("block-FP8", "MXFP9"),
        RIGHT.replace("1.0}", '1.0, "bias": true}'),
        RIGHT.replace('"ue8m0": false, ', ""),
        RIGHT.replace("false", '"no"', 1),
        RIGHT.replace('"limit": null', '"limit": 7'),
        RIGHT.replace('"limit": null', '"limit": "7"'),
        RIGHT.replace('"limit": null', '"limit": true'),
        RIGHT.replace('"limit": null', '"limit": []'),
        RIGHT.replace('"limit": null', '"limit": 1' + 400 * "0"),
        RIGHT.replace('"limit": null', '"limit": 1' + 5000 * "0"),
        RIGHT.replace('"limit": null', '"limit": NaN'),
        RIGHT.replace('"kind": "silu"', '"kind": []'),
        RIGHT.replace('"kind": "silu"', '"kind": null'),
        RIGHT.replace('"beta": 0.0', '"beta": -0.0'),
        RIGHT.replace("1.0}", "1" + 400 * "0" + "}"),
        RIGHT.replace("1.0}", '"1.0"}'),
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_a_text_of_no_options_is_refused(text):
    with pytest.raises(InvalidInputError, match=r"which does not describe a layer\. Pass the text of layer_options"):
        parse_options(text)


def test_a_graph_dump_shows_what_the_layer_is():
    text = layer_options(activation=Activation(limit=7.0), shared_expert=True, routed_scale=2.5).text
    assert text == (
        '{"weights": "block-FP8", "ue8m0": false, "activation": {"kind": "silu", "limit": 7.0, "alpha": 1.0, '
        '"beta": 0.0}, "shared_expert": true, "routed_scale": 2.5}'
    )
