"""The folders through which workers pass metrics to their server, and removal of the folders of killed servers.

A server holds a lock in its folder as long as it runs. The operating system releases the lock when the process ends in
any way, so a lock that can be acquired means that the server is gone, even if its process id was reused. The next
server of the same user then removes the folder. A folder without a lock file may be something else and is left alone.
"""

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8moe_plugin.logs import log_once
from fp8moe_plugin.quoting import shown

PREFIX = "fp8moe-metrics-"
LOCK = "server.lock"
WORKER_FILES = "*.prom"


def hold_lock(folder: Path) -> int:
    """Lock a new folder for this process.

    The lock file gets its final name only after it is locked, so that no other server ever finds it unlocked.

    Returns:
        A file descriptor that holds the lock while it is open.
    Raises:
        OSError: the file cannot be created or locked.
    """
    new = folder / f"{LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder / LOCK)
    return descriptor


def worker_files() -> Iterator[Path]:
    """Yields the files of all workers whose servers are run by this user on this machine."""
    for path in _folders():
        with contextlib.suppress(OSError):  # it is no server's folder, or is being removed
            with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder, _opened(LOCK, os.O_RDWR, folder) as lock:
                running = not _acquired(lock, fcntl.LOCK_SH)
            if running:
                yield from path.glob(WORKER_FILES)


def remove_stale_folders() -> None:
    """Remove this user's folders of servers that no longer run."""
    for path in _folders():
        try:
            _remove_if_stale(path)
        except FileNotFoundError:
            continue  # there is no lock file, or another server was faster
        except OSError as error:
            reason = f"{shown(str(path))}: {error.strerror}"
            log_once(logging.WARNING, f"the metrics of a killed server could not be removed from {reason}")


def _folders() -> Iterator[Path]:
    """Yields this user's folders with the prefix."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield path


def _acquired(lock: int, kind: int) -> bool:
    """Returns whether a lock could be acquired, which means that its server is gone."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_stale(path: Path) -> None:
    """Remove a folder unless its server runs, with the lock file last. Follows no symbolic links."""
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder, _opened(LOCK, os.O_RDWR, folder) as lock:
        if not _acquired(lock, fcntl.LOCK_EX):
            return
        for name in [entry.name for entry in os.scandir(folder)]:
            if name != LOCK:
                os.unlink(name, dir_fd=folder)
        os.unlink(LOCK, dir_fd=folder)
        path.rmdir()


@contextlib.contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
