"""The options of a mixture-of-experts layer: everything that it is, except the sizes of its tensors."""

import functools
import json
from dataclasses import dataclass, fields
from typing import Any

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import SILU, Activation, check_activation, is_number
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.quoting import shown


# Hashed by identity, which is fast: every call of a layer does. Equal options are one instance.
@dataclass(frozen=True, eq=False)
class LayerOptions:
    """The fields of `LayerSpec` that a call passes on. Only `layer_options` makes instances."""

    weights: WeightFormat
    ue8m0: bool
    activation: Activation
    shared_expert: bool
    routed_scale: float

    @functools.cached_property
    def text(self) -> str:
        """The form that torch ops take: JSON, equal in all processes, because compiled graphs are cached with it."""
        return json.dumps(_values(self) | {"weights": self.weights.name, "activation": self.activation._asdict()})

    def spec(self, shape: MoeShape, batch_invariant: bool) -> LayerSpec:
        return LayerSpec(shape, batch_invariant=batch_invariant, **_values(self))


def layer_options(
    weights: WeightFormat = FP8_BLOCK,
    ue8m0: bool = False,
    activation: Activation = SILU,
    shared_expert: bool = False,
    routed_scale: float = 1.0,
) -> LayerOptions:
    """Returns the options with these values; for their meaning see `LayerSpec`.

    Raises:
        InvalidInputError: see `check_activation`.
    """
    check_activation(activation)
    return _only(weights, bool(ue8m0), activation, bool(shared_expert), float(routed_scale))


@functools.cache
def options_of(spec: LayerSpec) -> LayerOptions:
    return layer_options(**_values(spec))


@functools.cache
def parse_options(text: str) -> LayerOptions:
    """Returns the options with this `text`.

    Raises:
        InvalidInputError: no options have it.
    """
    try:
        values = json.loads(text)
        weights = {known.name: known for known in FORMATS}[values.pop("weights")]
        options = layer_options(weights, activation=Activation(**values.pop("activation")), **values)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _unknown(text) from error
    if options.text != text:
        raise _unknown(text)
    return options


def _unknown(text: str) -> InvalidInputError:
    return InvalidInputError(
        f"options is {shown(text)}, which does not describe a layer. Pass the text of layer_options(..). If a compiled "
        "graph from an earlier version of the plugin contains it, delete torch.compile's caches."
    )


@functools.cache
def _only(
    weights: WeightFormat, ue8m0: bool, activation: Activation, shared_expert: bool, routed_scale: float
) -> LayerOptions:
    # Equal numbers have one text: 7 and 7.0, and by adding 0.0 also 0.0 and -0.0.
    numbers = {name: value + 0.0 for name, value in activation._asdict().items() if is_number(value)}
    return LayerOptions(weights, ue8m0, activation._replace(**numbers), shared_expert, routed_scale + 0.0)


def _values(options: LayerOptions | LayerSpec) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(LayerOptions)}
