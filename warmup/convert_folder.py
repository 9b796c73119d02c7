"""`convert`'s working folder `OUT.partial`: used by one process at a time, and resumed after an interruption.

OUT.partial/converted-from.json     the source; written first, removed last
OUT.partial/staging.part/           the lock, and the file being written; temporary
OUT.partial/...                     finished files; weight files are always complete
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel
from safetensors import SafetensorError

from fp8moe_plugin.checkpoint.untrusted import read_regular
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown
from warmup.convert_source import FileState

SOURCE = "converted-from.json"
STAGING = "staging.part"
LOCK = "lock"
MOST_SOURCE_BYTES = 1 << 20  # a thousand files take a fifth of it


class Source(BaseModel):
    """The source of an incomplete folder: work resumes only if the source files are the same."""

    folder: str
    files: dict[str, FileState]


@contextmanager
def working_folder(partial: Path, expected: Collection[str]) -> Iterator[FileLock]:
    """Create the folder or reuse that of an interrupted conversion, and lock it against other processes.

    Args:
        expected: names of the files that a conversion creates there.
    Returns:
        The lock on the folder, which `publish` releases.
    Raises:
        UnsupportedError: another conversion uses the folder, or it contains anything else.
        OSError: it cannot be created.
    """
    staging = partial / STAGING
    lock = FileLock(staging / LOCK, timeout=0)
    try:
        _check_content(partial, expected)
        partial.mkdir(exist_ok=True)
        staging.mkdir(exist_ok=True)
        lock.acquire()
    except (Timeout, FileNotFoundError):  # the latter when another process has just finished
        raise UnsupportedError(
            f"Another conversion is writing to {shown(str(partial))}. Wait for it to finish, or choose another --out."
        ) from None
    except NotImplementedError:  # raised by older versions of filelock
        raise UnsupportedError(
            f"The file system of {shown(str(partial))} does not support locks, which keep two conversions "
            "apart. Choose an --out on another file system."
        ) from None
    try:
        for path in staging.iterdir():  # left by a process that was killed while writing
            if path.name != LOCK:
                path.unlink()
        yield lock
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # the next run removes the rest
        with suppress(OSError):  # fails if there are finished files, which are kept
            partial.rmdir()
        raise
    finally:
        lock.release()


def _check_content(partial: Path, expected: Collection[str]) -> None:
    if not os.path.lexists(partial):
        return
    if not partial.is_dir():
        raise _not_ours(partial)
    found = {path.name for path in partial.iterdir()} - {STAGING}
    if found and SOURCE not in found:
        raise _not_ours(partial)
    strange = sorted(found - {SOURCE, *expected})
    if strange:
        raise UnsupportedError(
            f"{shown(str(partial))} contains {shown(strange[0])}, which is not a part of this conversion. Move it "
            "away, delete the folder, or choose another --out."
        )


def claim(partial: Path, source: Source) -> None:
    """Record the source in a new folder, or raise `UnsupportedError` if an existing one has another source."""
    if os.path.lexists(partial / SOURCE):
        if not is_made_from(partial, source):
            raise _not_ours(partial)
        return
    staged = partial / STAGING / SOURCE
    with writing(partial / SOURCE):
        staged.write_text(source.model_dump_json())
        staged.replace(partial / SOURCE)


def is_made_from(folder: Path, source: Source) -> bool:
    """Returns whether a folder is marked as a conversion of these files."""
    try:
        return Source.model_validate_json(read_regular(folder / SOURCE, MOST_SOURCE_BYTES)) == source
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the file is not ours
        return False


def _not_ours(partial: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{shown(str(partial))} exists, but is not from an interrupted conversion of these files. Delete it, or "
        "choose another --out."
    )


def publish(partial: Path, out: Path, lock: FileLock) -> None:
    """Give the finished folder its final name."""
    partial.rename(out)
    lock.release()  # on NFS a folder with an open file cannot be removed
    tidy(out)


def tidy(out: Path) -> None:
    """Remove the files that only an incomplete folder needs."""
    shutil.rmtree(out / STAGING, ignore_errors=True)  # another process may be doing the same
    (out / SOURCE).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of writing the file `path` into an `UnsupportedError` that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors: "Error while serializing: I/O error: No space left on device (os error 28)".
        reason = error.strerror if isinstance(error, OSError) else str(error).rpartition("error: ")[2]
        raise UnsupportedError(
            f"{shown(str(path))} cannot be written: {reason}. Check the free disk space and the limit on file sizes "
            "(ulimit -f), then run the command again: it continues where it stopped."
        ) from error
