"""Quotes text of unknown origin in messages, so that it cannot be long or contain terminal control sequences."""

import os
import reprlib
import shlex

SHOWN_LENGTH = 300  # characters of untrusted text in a message, enough to recognize a path or a list

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlong, _repr.maxlevel = 200, 80, 40, 3


def shown(value: object) -> str:
    """Returns an untrusted value for a message, truncated and quoted: it cannot contain terminal control sequences."""
    text = _repr.repr(value)
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 3] + "..."


def shown_text(text: object) -> str:
    """Returns text for a message: unchanged if it is short and printable, as most paths are, otherwise quoted."""
    plain = str(text)
    return plain if len(plain) <= SHOWN_LENGTH and plain.isprintable() else shown(plain)


def shell_word(text: str) -> str:
    """Text as one word of a shell command in a message: quoted for bash, without terminal control sequences."""
    if text.isprintable():
        return shlex.quote(text)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(plain)}'"


def any_of(choices: tuple[object, ...]) -> str:
    """Returns the choices as a list for a message: `32, 64 or 128`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
