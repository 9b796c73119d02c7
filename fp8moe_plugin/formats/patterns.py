"""Regular expressions in a checkpoint's list of unquantized layers: the entries that begin with `re:`.

They are untrusted: a short pattern can keep Python's backtracking `re` busy for hours. So a list is checked before
any pattern is used: the number and the length of patterns are limited, and the parsed patterns give an upper bound of
the steps to match a name.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from re import _parser  # type: ignore[attr-defined]  # the parser of the engine that matches
from typing import Any

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

PATTERN = "re:"
MAX_PATTERNS = 512
MAX_LENGTH = 512  # characters of a pattern
MAX_STEPS = 1 << 19  # to match a name against all patterns of a list: some milliseconds
NAME_LENGTH = 64  # characters of a layer's name
REPEATED = NAME_LENGTH // 8  # occurrences of a character in a name
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
PLAIN = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "CATEGORY")  # one character each


class _Refused(Exception):
    """A pattern is refused; the message says what it contains."""


def check_patterns(names: Sequence[str], key: str) -> None:
    """Raise `UnsupportedError` if a list has patterns that are not valid, or that may take long to match.

    Args:
        names: the list, of names and patterns.
        key: its key in `quantization_config`, for messages.
    """
    patterns = [name for name in names if name.startswith(PATTERN)]
    if len(patterns) > MAX_PATTERNS:
        raise _refusal(key, f"has {len(patterns)} patterns, more than {MAX_PATTERNS}")
    left = MAX_STEPS
    for name in patterns:
        try:
            left -= _steps_of(name.removeprefix(PATTERN))
        except _Refused as found:
            raise _refusal(key, f"has the pattern {shown(name)}, which {found}") from None
        if left < 0:
            raise _refusal(key, f"has patterns that may take long to match, such as {shown(name)}")


def matches(patterns: Iterable[str], layer: str) -> bool:
    """Returns whether a pattern matches the beginning of a layer's full name, as in compressed-tensors."""
    return any(_compiled(pattern).match(layer) for pattern in patterns)


@functools.lru_cache(maxsize=2 * MAX_PATTERNS)  # more than the cache of `re` itself
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.removeprefix(PATTERN))


def _refusal(key: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"--quantization {NAME}: {key} of the checkpoint's quantization_config {why}. Names of layers and simple "
        "regular expressions are supported: write the list in its config.json with these, or remove --quantization to "
        "let the engine choose the method."
    )


def _steps_of(pattern: str) -> int:
    if len(pattern) > MAX_LENGTH:
        raise _Refused(f"has {len(pattern)} characters, more than {MAX_LENGTH}")
    try:
        steps, _ = _steps(_parser.parse(pattern), 0, literal=False)
        re.compile(pattern)  # last: a range beyond ASCII, which `_steps` refuses, takes long with (?i)
    except (re.error, OverflowError, RecursionError) as error:
        raise _Refused(f"is not a valid regular expression: {error}") from None
    return steps


def _steps(items: Iterable[tuple[Any, Any]], rest: int, literal: bool) -> tuple[int, bool]:
    """Returns an upper bound of the steps to find that parsed items and the rest of the pattern do not match.

    Args:
        items: the items parsed by `re`, pairs of an operation and its arguments.
        rest: the steps for the rest of the pattern.
        literal: the rest begins with a certain character, so it is tried at few positions only.
    Returns:
        `rest` and `literal` of the items followed by the rest.
    """
    for op, argument in reversed(list(items)):
        match str(op):
            case name if name in PLAIN or name == "AT":
                _check_ranges(name, argument)
                rest, literal = rest + 1, name == "LITERAL"
            case name if name in REPEATS:
                least, most, body = argument
                rest, literal = _repeated(least, most, body, rest, literal), False
            case "SUBPATTERN" | "ATOMIC_GROUP":
                rest, literal = _steps(argument[-1] if str(op) == "SUBPATTERN" else argument, rest, literal)
            case "BRANCH":
                rest, literal = sum(_steps(part, rest, literal)[0] for part in argument[1]), False
            case "ASSERT" | "ASSERT_NOT":
                rest, literal = rest + NAME_LENGTH + _steps(argument[1], 0, literal=False)[0], False
            case "GROUPREF" | "GROUPREF_EXISTS":
                raise _Refused("contains a backreference")
            case other:
                raise _Refused(f"contains {other}, which is not known")
    return rest, literal


def _repeated(least: int, most: int, body: Iterable[tuple[Any, Any]], rest: int, literal: bool) -> int:
    if least == rest == 0:  # nothing follows, so it never fails
        return 0
    if most <= 1:
        return rest + _steps(body, rest, literal)[0]
    once = _fixed(body)
    places = 1 if least == most else REPEATED if literal else NAME_LENGTH
    return min(most, NAME_LENGTH) * once + places * rest


def _fixed(body: Iterable[tuple[Any, Any]]) -> int:
    """Returns the number of characters that a quantifier repeats.

    Refuses bodies that can match in several ways, because matching them could take forever.
    """
    length = 0
    for op, argument in body:
        match str(op):
            case name if name in PLAIN:
                _check_ranges(name, argument)
                length += 1
            case "SUBPATTERN":
                length += _fixed(argument[-1])
            case name if name in REPEATS:
                raise _Refused("contains nested quantifiers")
            case "GROUPREF" | "GROUPREF_EXISTS":
                raise _Refused("contains a backreference")
            case _:
                raise _Refused("repeats alternatives or assertions with a quantifier")
    return length


def _check_ranges(op: str, argument: Any) -> None:
    if op == "IN" and any(str(part) == "RANGE" and ends[1] > 127 for part, ends in argument):
        raise _Refused("contains a range of characters beyond ASCII")
