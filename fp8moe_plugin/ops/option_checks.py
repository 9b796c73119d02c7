"""Checks of arguments that are not tensors. A tensor is refused, because reading its value would need a sync."""

from collections.abc import Sequence
from typing import Any

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.formats.activation import FLOAT32_TINY, KINDS, Activation, is_number, shown_number
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.quoting import any_of


def check_int(name: str, value: int, least: int | None = None) -> None:
    """Raise `InvalidInputError` unless `value` is an int that fits 32 bits, and is at least `least`."""
    if not isinstance(value, int):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, not an int. Pass a Python number.")
    if not -(2**31) <= value < 2**31:
        raise InvalidInputError(
            f"{name} does not fit 32 bits, in which the kernels take it. Check where it is computed."
        )
    if least is not None and value < least:
        raise InvalidInputError(f"{name} is {value}, needs {least} or more. Check where it is computed.")


def check_ints(name: str, given: Sequence[int], counts: tuple[int, ...], what: str) -> Any:
    """Returns the ints as a tuple.

    Args:
        counts: the allowed numbers of ints.
        what: what to do, for the message.
    Raises:
        InvalidInputError: `given` is not a tuple or list of ints, or has another length.
    """
    valid = isinstance(given, tuple | list) and len(given) in counts and all(type(number) is int for number in given)
    if not valid:
        raise InvalidInputError(f"{name} is {_shown(given)}, needs {any_of(counts)} ints. {what}")
    return tuple(given)


def check_flag(name: str, value: bool) -> None:
    """Raise `InvalidInputError` unless `value` is a bool, 0 or 1."""
    if type(value) is bool:  # first, as each layer calls this
        return
    if not isinstance(value, int):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, not a bool. Pass True or False.")
    if value not in (0, 1):
        raise InvalidInputError(f"{name} is {value}, needs True or False. Pass one of them.")


def check_factor(name: str, value: float) -> None:
    """Raise `InvalidInputError` unless `value` is positive, normal and finite in float32."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, not a float. Pass a Python number.")
    if not (is_number(value) and value >= FLOAT32_TINY):
        raise InvalidInputError(f"{name} is {shown_number(value)}, needs a positive finite number in float32.")


def check_format(weights: WeightFormat) -> None:
    """Raise `InvalidInputError` unless `weights` is one of the formats that kernels compute."""
    if not isinstance(weights, WeightFormat) or weights not in FORMATS:
        names = any_of(tuple(known.name for known in FORMATS))
        raise InvalidInputError(f"weights is {_shown(weights)}, needs a WeightFormat: that of {names}.")


def as_activation(activation: str | Activation) -> Activation:
    """Returns the activation with this name. Raises `InvalidInputError` if there is none."""
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str) or activation not in KINDS:
        names = any_of(tuple(map(repr, KINDS)))
        raise InvalidInputError(f"activation is {_shown(activation)}, needs {names}, or an Activation.")
    return Activation(activation)


def check_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `InvalidInputError` unless `value` is one of these ints, bools or dtypes."""
    if not isinstance(value, int | torch.dtype) or value not in choices:
        raise InvalidInputError(
            f"{name} is {_shown(value)}, needs {any_of(choices)}. There is no kernel for other values."
        )


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
