"""`OUT.partial`, where `convert` works: used by one process at a time, and resumed after an interruption.

OUT.partial/converted-from.json     the source; written first, removed last
OUT.partial/staging.part/           the lock, and the file that is being written; nothing in it is kept
OUT.partial/...                     what is done; weight files are whole
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from fp8moe_plugin.checkpoint.untrusted import shown
from fp8moe_plugin.errors import UnsupportedError
from warmup.convert_source import FileState

SOURCE = "converted-from.json"
STAGING = "staging.part"
LOCK = "lock"


class Source(BaseModel):
    """What an incomplete folder is made from: work resumes only if the source files are the same."""

    folder: str
    files: dict[str, FileState]


@contextmanager
def working_folder(partial: Path, expected: Collection[str]) -> Iterator[FileLock]:
    """Make the folder, or take over the one that an interrupted conversion left; no other process uses it meanwhile.

    Args:
        expected: names of the files that a conversion puts there.
    Returns:
        The lock on the folder, which `publish` releases.
    Raises:
        UnsupportedError: another conversion uses the folder, or it holds something else.
        OSError: it cannot be made.
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
            f"Another conversion is writing to {shown(str(partial))}. Wait for it to end, or give another --out."
        ) from None
    except NotImplementedError:  # of older versions of filelock
        raise UnsupportedError(
            f"The file system of {shown(str(partial))} has no locks, which keep two conversions apart. Give an --out "
            "on another one."
        ) from None
    try:
        for path in staging.iterdir():  # of a process that was killed while it wrote
            if path.name != LOCK:
                path.unlink()
        yield lock
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)  # the next run removes what is left
        with suppress(OSError):  # it is not empty: what is done is kept
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
            f"{shown(str(partial))} holds {shown(strange[0])}, which is not a part of this conversion. Move it away, "
            "or delete the folder, or give another --out."
        )


def claim(partial: Path, source: Source) -> None:
    """Note in a new folder what is converted there; raise `UnsupportedError` if an old one is of other files."""
    if os.path.lexists(partial / SOURCE):
        if not is_made_from(partial, source):
            raise _not_ours(partial)
        return
    staged = partial / STAGING / SOURCE
    with writing(partial / SOURCE):
        staged.write_text(source.model_dump_json())
        staged.replace(partial / SOURCE)


def is_made_from(folder: Path, source: Source) -> bool:
    """Whether a folder is marked as a conversion of these files."""
    try:
        return Source.model_validate_json((folder / SOURCE).read_bytes()) == source
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return False


def _not_ours(partial: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{shown(str(partial))} is there, and is not from an interrupted conversion of these files. Delete it, or "
        "give another --out."
    )


def publish(partial: Path, out: Path, lock: FileLock) -> None:
    """Give the finished folder its name."""
    partial.rename(out)
    lock.release()  # on NFS a folder with an open file cannot be removed
    tidy(out)


def tidy(out: Path) -> None:
    """Remove from the result what only an incomplete folder needs."""
    shutil.rmtree(out / STAGING, ignore_errors=True)  # another process may be doing the same
    (out / SOURCE).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `UnsupportedError`, which says what to do, if what is written to the file `path` does not get there."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # Of safetensors' own: "Error while serializing: I/O error: No space left on device (os error 28)".
        reason = error.strerror if isinstance(error, OSError) else str(error).rpartition("error: ")[2]
        raise UnsupportedError(
            f"{shown(str(path))} cannot be written: {reason}. Check the space on the disk and the limit on the size of "
            "a file (ulimit -f), then run the command again: it goes on where it stopped."
        ) from error
