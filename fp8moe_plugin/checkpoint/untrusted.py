"""Reads a checkpoint's files as untrusted input, with bounds on bytes and memory."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.quoting import SHOWN_LENGTH, shown

ADVICE = "Download the checkpoint again, from a source you trust."
MAX_SIZE = 2**31 - 1  # for all sizes and counts, so that products of two fit in 64 bits
SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


class Limits(NamedTuple):
    """The limits of a JSON text, or its size. Bytes alone do not bound memory: `[],` takes 64 bytes in Python."""

    size: int
    containers: int  # lists and objects
    values: int  # in lists and objects

    def check(self, spent: "Limits", what: str) -> None:
        """Raise `CheckpointError` if `spent` exceeds these limits."""
        for noun, limit, used in zip(("bytes", "lists and objects", "values"), self, spent, strict=True):
            if used > limit:
                raise CheckpointError(f"{what} has more than {limit} {noun}, more than any real file has. {ADVICE}")


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint for reading.

    The file that is checked is the one that is read, even if it is replaced in between.

    Raises:
        CheckpointError: it is not a regular file, or it is a link to a file outside of the checkpoint.
        OSError: it is missing or cannot be opened.
    """
    folder = Path(os.path.realpath(path.parent, strict=True))
    handle = os.open(
        str(path), os.O_PATH | os.O_CLOEXEC
    )  # does not open it yet: opening a device may have side effects
    try:
        target = Path(f"/proc/self/fd/{handle}").readlink()
        if not _belongs(target, folder):
            raise CheckpointError(
                f"{shown(str(path))} links to {shown(str(target))}, outside of the checkpoint's folder. Such links "
                "are not followed, as they may lead anywhere. Replace it with a copy of the file."
            )
        file = open(path, "rb", opener=lambda name, flags: _reopen(handle, name, flags))  # noqa: SIM115
    finally:
        os.close(handle)
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{shown(str(path))} is not a regular file. {ADVICE}")
        yield file


def read_regular(path: Path, limit: int) -> bytes:
    """Returns the bytes of a file that the user names. Unlike `opened`, follows links anywhere.

    Raises:
        ValueError: it is not a regular file, or has more than `limit` bytes, which must be whole MiB.
        OSError: it is missing or cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe without a writer would block
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"it is larger than {limit >> 20} MiB")
        with open(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(handle)


def _reopen(handle: int, name: str, flags: int) -> int:
    """Open the file that a descriptor refers to with other flags; errors have its original name."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        return os.open(f"/proc/self/fd/{handle}", flags | os.O_NONBLOCK)
    except OSError as error:
        error.filename = str(name)
        raise


def _belongs(target: Path, folder: Path) -> bool:
    """Returns whether a file is in the checkpoint's folder, or a blob in huggingface_hub's cache.

    In this cache, `snapshots/X/f` links to `blobs/hash`, which may link to a blob that several models share,
    `<cache>/blobs/<first two digits>/<hash>`.
    """
    if target.is_relative_to(folder):
        return True
    model = folder.parent.parent
    shared = SHARED_BLOB.fullmatch(target.name) and target.parent == model.parent / "blobs" / target.name[:2]
    return folder.parent.name == "snapshots" and (target.parent == model / "blobs" or bool(shared))


def is_hub_snapshot(folder: Path) -> bool:
    """Returns whether a folder is in huggingface_hub's cache, which downloads single files on demand."""
    folder = folder.resolve()
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()


def read_json(
    file: BinaryIO, size: int, limits: Limits, what: str, plain: bool = False, constants: bool = False
) -> tuple[dict[str, Any], Limits]:
    """Read the JSON object in the next `size` bytes of a file. Returns it, and its size.

    Args:
        what: the file's name, for messages.
        plain: allow only ASCII without escapes, enough for plain names.
        constants: allow NaN and infinities.

    Raises:
        CheckpointError: it is not a JSON object, or exceeds the limits.
    """
    text, spent = _read_text(file, size, limits, what, plain)
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=float if constants else _refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{what} nests lists or objects too deeply. {ADVICE}") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {str(error)[:SHOWN_LENGTH]}. {ADVICE}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} contains {shown(found)} instead of a JSON object. {ADVICE}")
    return found, spent


def _read_text(file: BinaryIO, size: int, limits: Limits, what: str, plain: bool) -> tuple[str, Limits]:
    data = file.read(min(size, limits.size + 1))
    spent = Limits(len(data), data.count(b"[") + data.count(b"{"), data.count(b","))
    limits.check(spent, what)
    if plain and (not data.isascii() or b"\\" in data):
        raise CheckpointError(
            f"{what} contains a backslash or non-ASCII characters, which its names do not need. {ADVICE}"
        )
    try:
        return data.decode(), spent
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8 text: byte {error.start} is not valid. {ADVICE}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {shown(twice)} more than once")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
