"""Checks of arguments that are no tensors. A tensor in their place would cost a sync, and is refused."""

from collections.abc import Sequence
from typing import Any

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.plan.sm90.indexer import any_of

LARGEST = torch.finfo(torch.float32).max


def check_int(name: str, value: int, least: int | None = None) -> None:
    """Raise `InvalidInputError` unless `value` is an int of 32 bits, as the kernels take it, and not below `least`."""
    if not isinstance(value, int):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, not an int. Pass a number the host knows.")
    if not -(2**31) <= value < 2**31:
        raise InvalidInputError(f"{name} does not fit 32 bits, in which the kernels take it. Check who computes it.")
    if least is not None and value < least:
        raise InvalidInputError(f"{name} is {value}, needs {least} or more. Check who computes it.")


def check_ints(name: str, given: Sequence[int], counts: tuple[int, ...], what: str) -> Any:
    """Returns a tuple of ints, whose number is one of `counts`. Raises `InvalidInputError`, with `what` to do."""
    right = isinstance(given, tuple | list) and len(given) in counts and all(type(number) is int for number in given)
    if not right:
        raise InvalidInputError(f"{name} is {_shown(given)}, needs {any_of(counts)} ints. {what}")
    return tuple(given)


def check_flag(name: str, value: bool) -> None:
    """Raise `InvalidInputError` unless `value` is a bool, or 0 or 1 in its place."""
    if type(value) is bool:  # first, as each layer calls this
        return
    if not isinstance(value, int):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, not a bool. Pass True or False.")
    if value not in (0, 1):
        raise InvalidInputError(f"{name} is {value}, needs True or False. Pass one of them.")


def check_factor(name: str, value: float) -> None:
    """Raise `InvalidInputError` unless `value` is positive, and finite in float32."""
    if not isinstance(value, float | int):
        raise InvalidInputError(f"{name} is a {type(value).__name__}, not a float. Pass a number the host knows.")
    if not 0 < value <= LARGEST:
        raise InvalidInputError(f"{name} is {value}, needs a positive finite number.")


def check_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `InvalidInputError` unless `value` is one of these ints, bools or dtypes."""
    if not isinstance(value, int | torch.dtype) or value not in choices:
        raise InvalidInputError(f"{name} is {_shown(value)}, needs {any_of(choices)}. Other ones have no kernel.")


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
