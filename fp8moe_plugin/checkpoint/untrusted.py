"""Files of a checkpoint, read as if an attacker wrote them: bounded in bytes and in memory, shown cut and quoted."""

import json
import os
import re
import reprlib
import shlex
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp8moe_plugin.errors import CheckpointError

ADVICE = "Download the checkpoint again, from a source you trust."
MAX_SIZE = 2**31 - 1  # of anything that is counted: products of two fit 64 bits
SHOWN_LENGTH = 300  # of untrusted text in a message: enough to recognize a path or a list

SHARED_BLOB = re.compile(r"[0-9a-f]{64}")

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlong, _repr.maxlevel = 200, 80, 40, 3


class Limits(NamedTuple):
    """What a JSON text may have, or has. Beside bytes, what takes memory and time: `[],` is 3 bytes, in Python 64."""

    size: int
    containers: int  # lists and objects
    values: int  # of lists and objects

    def check(self, spent: "Limits", what: str) -> None:
        """Raise `CheckpointError` if more is spent than these limits."""
        for noun, limit, used in zip(("bytes", "lists and objects", "values"), self, spent, strict=True):
            if used > limit:
                raise CheckpointError(f"{what} has more than {limit} {noun}, more than any real file has. {ADVICE}")


def shown(value: object) -> str:
    """An untrusted value for a message: quoted, so that a terminal does not obey it, and cut."""
    text = _repr.repr(value)
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 3] + "..."


def shown_text(text: object) -> str:
    """Text for a message: unchanged if it is short and printable, as a path usually is, else as `shown`."""
    plain = str(text)
    return plain if len(plain) <= SHOWN_LENGTH and plain.isprintable() else shown(plain)


def shell_word(text: str) -> str:
    """Text as one word of a command in a message: quoted as bash reads it, and so that a terminal does not obey it."""
    if text.isprintable():
        return shlex.quote(text)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(text))
    return f"$'{''.join(plain)}'"


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A file of a checkpoint, open for reading.

    What is judged is what is read, also if someone exchanges the file meanwhile.

    Raises:
        CheckpointError: it is no regular file, or a link out of the checkpoint.
        OSError: it is missing or cannot be opened.
    """
    folder = Path(os.path.realpath(path.parent, strict=True))
    handle = os.open(str(path), os.O_PATH | os.O_CLOEXEC)  # only finds the file: to open a device may have effects
    try:
        target = Path(f"/proc/self/fd/{handle}").readlink()
        if not _belongs(target, folder):
            raise CheckpointError(
                f"{shown(str(path))} links to {shown(str(target))}, outside of the checkpoint's folder: a link could "
                "lead to anything. Put a copy of the file in its place."
            )
        file = open(path, "rb", opener=lambda name, flags: _reopen(handle, name, flags))  # noqa: SIM115
    finally:
        os.close(handle)
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{shown(str(path))} is no regular file. {ADVICE}")
        yield file


def _reopen(handle: int, name: str, flags: int) -> int:
    """The file behind a descriptor, opened with other flags; errors name it."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        return os.open(f"/proc/self/fd/{handle}", flags | os.O_NONBLOCK)
    except OSError as error:
        error.filename = str(name)
        raise


def _belongs(target: Path, folder: Path) -> bool:
    """A file in the checkpoint's folder; or in huggingface_hub's cache, where `snapshots/X/f` links to `blobs/hash`.

    That may link on to a blob that several models share, `<cache>/blobs/<first two digits>/<hash>`.
    """
    if target.is_relative_to(folder):
        return True
    model = folder.parent.parent
    shared = SHARED_BLOB.fullmatch(target.name) and target.parent == model.parent / "blobs" / target.name[:2]
    return folder.parent.name == "snapshots" and (target.parent == model / "blobs" or bool(shared))


def is_hub_snapshot(folder: Path) -> bool:
    """Whether a folder is in huggingface_hub's cache, which fetches file by file what is asked for."""
    folder = folder.resolve()
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()


def read_json(
    file: BinaryIO, size: int, limits: Limits, what: str, plain: bool = False, constants: bool = False
) -> tuple[dict, Limits]:
    """The JSON object in the next `size` bytes of a file, and what it has of what the limits limit.

    Args:
        what: names the file in messages.
        plain: it holds nothing but names, so ASCII without escapes.
        constants: it may hold NaN and infinities.

    Raises:
        CheckpointError: it is no JSON object, or exceeds the limits.
    """
    text, spent = _read_text(file, size, limits, what, plain)
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=float if constants else _refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{what} nests lists or objects too deep. {ADVICE}") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is no JSON: {str(error)[:SHOWN_LENGTH]}. {ADVICE}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} holds {shown(found)} instead of a JSON object. {ADVICE}")
    return found, spent


def _read_text(file: BinaryIO, size: int, limits: Limits, what: str, plain: bool) -> tuple[str, Limits]:
    data = file.read(min(size, limits.size + 1))
    spent = Limits(len(data), data.count(b"[") + data.count(b"{"), data.count(b","))
    limits.check(spent, what)
    if plain and (not data.isascii() or b"\\" in data):
        raise CheckpointError(f"{what} has a backslash or other characters that no name in it needs. {ADVICE}")
    try:
        return data.decode(), spent
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is no UTF-8 text: byte {error.start} cannot be. {ADVICE}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {shown(twice)} more than once")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
