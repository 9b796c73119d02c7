"""The kernel cache on disk: lookup, checks and addition of compiled kernels.

    <cache_dir>/<source>-<digest>.cubin     the sha256 of name and cubin (32 bytes), then the cubin

Entries are written atomically. The checksum detects later damage, and entries that were swapped. Reading never writes.
Locks only avoid duplicate work: a process that cannot get one compiles anyway, and uses the bytes that it compiled even
if another process publishes first. Nothing depends on the clock. A folder that other users can write to is not used.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import platformdirs
from filelock import BaseFileLock, FileLock, Timeout

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit.atomic import make_folder, write_whole
from fp8moe_plugin.jit.cubin import cubin_fault
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.quoting import shown_text
from fp8moe_plugin.settings import settings

logger = logging.getLogger("fp8moe")
ADVICE = (
    "Set FP8MOE_CACHE_DIR to a folder of your own with mode 0700, or serve from a bundle (FP8MOE_BUNDLE) where a "
    "volume sets other modes (fsGroup)."
)
FULL = (errno.ENOSPC, errno.EDQUOT)
DANGLING_LINK = "it is a dangling symbolic link"
CHECKSUM_BYTES = hashlib.sha256().digest_size
# Entries, locks, temporary files, and what FP8MOE_JIT_DEBUG writes; the group is of an entry's name without its suffix.
FILE = re.compile(r"(\w+-[0-9a-f]{64})\.(cubin|cu|py|elf|sass|txt)(\.lock|\.[0-9a-f]{16}\.part)?")
MAX_BYTES = 1 << 24  # per entry; kernels are smaller than 100 KB
LOCK_PATIENCE_S = 3  # before a warning is logged
LOCK_TIMEOUT_S = 60  # many times the compile time of the slowest kernel


class Missing(Exception):
    """There is no valid entry of this name; the message says where and why."""


class Damaged(Missing):
    """There is an entry, but its content has changed since it was written."""


def cache_dir() -> Path:
    """Returns the folder of the kernel cache, which need not exist.

    Raises:
        CacheError: the home folder is unknown, or the path is relative and the current folder was removed.
    """
    chosen, vllm = settings().cache_dir, os.environ.get("VLLM_CACHE_ROOT")
    try:
        folder = chosen or (Path(vllm, "fp8moe") if vllm else platformdirs.user_cache_path("fp8moe"))
        folder = folder.expanduser()
        return folder.absolute()
    except RuntimeError as error:
        where = shown_text(chosen or vllm or "the default, ~/.cache")
        raise CacheError(f"the home folder is unknown, but needed for {where}. {ADVICE}") from error
    except OSError as error:
        raise CacheError(f"{shown_text(folder)} cannot be resolved: {error.strerror}. {ADVICE}") from error


def read(name: str, target: str = SM90) -> bytes:
    """Returns the cubin of an entry, which must be for this target.

    Raises:
        Missing: there is no such entry, or the folder must not be used. `Damaged`: the entry is not valid.
    """
    try:
        path = cache_dir()
        with _opened(path) as folder, _file(name, folder) as file:
            size = os.fstat(file.fileno()).st_size  # 0 for pipes and devices
            entry = file.read(size) if size <= MAX_BYTES else None
    except FileNotFoundError as error:
        raise Missing(f"{shown_text(path)} does not contain it") from error
    except OSError as error:
        raise Missing(f"{_culprit(path, name, error)} cannot be read: {error.strerror}") from error
    except CacheError as error:
        raise Missing(str(error)) from error
    if entry is None:
        raise Damaged(f"{shown_text(path / name)} is damaged: it is larger than {MAX_BYTES >> 20} MiB")
    cubin = entry[CHECKSUM_BYTES:]
    fault = "its checksum differs" if seal(name, cubin) != entry else cubin_fault(cubin, target)
    if fault:
        raise Damaged(f"{shown_text(path / name)} is damaged: {fault}")
    return cubin


def publish(name: str, cubin: bytes) -> None:
    """Atomically add or replace an entry.

    Raises:
        CacheError: the folder must not be used, or cannot be written to.
    """
    write(name, seal(name, cubin))


def write(name: str, content: bytes) -> None:
    """Atomically add or replace a file of the folder. Raises `CacheError`, as `publish` does."""
    path = cache_dir()
    try:
        with _opened(path, make=True) as folder:
            write_whole(folder, name, content, 0o600)
    except OSError as error:
        raise CacheError(
            f"{_culprit(path, name, error)} cannot be written: {error.strerror}. {_advice(error)}"
        ) from error


def stored() -> dict[str, int]:
    """Returns the sizes of the files that were written to the cache, by name; other files are left out.

    Raises:
        CacheError: the folder must not be used, or cannot be listed.
    """
    path, found = cache_dir(), {}
    try:
        with _opened(path) as folder, os.scandir(folder) as entries:
            for entry in entries:
                if FILE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # another process was faster
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CacheError(f"{shown_text(path)} cannot be read: {error.strerror}. {ADVICE}") from error
    return found


def remove(names: Iterable[str]) -> None:
    """Delete files of the folder, which other processes may use meanwhile: they compile what they miss.

    Raises:
        CacheError: the folder must not be used, or a file cannot be deleted.
    """
    path = cache_dir()
    try:
        with _opened(path) as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
    except OSError as error:
        raise CacheError(
            f"{_culprit(path, str(error.filename), error)} cannot be deleted: {error.strerror}."
        ) from error


def _advice(error: OSError) -> str:
    if isinstance(error, IsADirectoryError):  # a folder has the entry's name
        return "Delete it."
    if error.errno in FULL:
        return "Free space there, or set FP8MOE_CACHE_DIR to a folder on another disk."
    return ADVICE


def _culprit(path: Path, name: str, error: OSError) -> str:
    """Returns the path that caused an error, for a message: the entry or the folder."""
    return shown_text(path / name if name in (error.filename, error.filename2) else path)


def require_usable() -> None:
    """Raise `CacheError` unless the folder exists or can be created, and can be read and written."""
    _check_usable(cache_dir(), make=True)


def _check_usable(path: Path, make: bool) -> None:
    try:
        with _opened(path, make):
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CacheError(f"{shown_text(path)} cannot be written: {error.strerror}. {ADVICE}") from error


def why_not_usable() -> str | None:
    """Returns why kernels cannot be added to the cache, or None if they can. Creates nothing."""
    try:
        path = cache_dir()
        if not os.path.lexists(path):
            return why_not_creatable(path)
        _check_usable(path, make=False)
    except CacheError as error:
        return str(error)
    return None


def why_not_creatable(path: Path) -> str | None:
    """Returns why a folder that does not exist cannot be created; None if it can."""
    existing = next(parent for parent in path.parents if os.path.lexists(parent))
    if os.access(existing, os.W_OK | os.X_OK) and existing.is_dir():
        return None
    return f"{shown_text(path)} does not exist, and cannot be created in {shown_text(existing)}. {ADVICE}"


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other processes from compiling the same entry, if the file system supports locks."""
    try:
        path = cache_dir()
        with _opened(path, make=True):
            lock = FileLock(path / f"{name}.lock", mode=0o600)
        _acquire(lock)
    except (OSError, NotImplementedError, CacheError):  # work without a lock; `publish` reports an unusable folder
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        with contextlib.suppress(OSError):  # the folder cannot be listed
            for abandoned in path.glob(f"{name}.*.part"):  # left by a process that died while it held the lock
                with contextlib.suppress(OSError):  # the folder is read-only, or another process was faster
                    abandoned.unlink()
        yield


def _acquire(lock: BaseFileLock) -> None:
    try:
        lock.acquire(timeout=LOCK_PATIENCE_S)
    except Timeout:
        file = shown_text(lock.lock_file)
        logger.warning("fp8moe: waiting up to %d s for the process that holds %s", LOCK_TIMEOUT_S, file)
        lock.acquire(timeout=LOCK_TIMEOUT_S)


def seal(name: str, cubin: bytes) -> bytes:
    """Returns the bytes of an entry. The checksum covers the name, so that an entry under another name is not valid."""
    return hashlib.sha256(name.encode() + b"\0" + cubin).digest() + cubin


@contextlib.contextmanager
def _opened(path: Path, make: bool = False) -> Iterator[int]:
    """Yields a descriptor of the folder, so that the checked folder is the one used. Raises `CacheError`, `OSError`."""
    if is_dangling_link(path):
        raise CacheError(f"{shown_text(path)} is not used: {DANGLING_LINK}. {ADVICE}")
    if make:
        make_folder(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        refusal = folder_refusal(os.fstat(folder))
        if refusal:
            raise CacheError(f"{shown_text(path)} is not used: {refusal}. {ADVICE}")
        yield folder
    finally:
        os.close(folder)


def is_dangling_link(path: Path) -> bool:
    """Returns whether this is a symbolic link without a target, or to itself. Raises `OSError`."""
    return path.is_symlink() and not path.exists()


def folder_refusal(status: os.stat_result) -> str | None:
    """Returns why a folder may contain kernels from other users, or None if it cannot."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, but this process runs as user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users write to it"
    return None


def _file(name: str, folder: int) -> BinaryIO:
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(name, "rb", opener=lambda name, flags: os.open(name, flags | more, dir_fd=folder))
