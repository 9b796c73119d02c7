"""The folders in which workers leave their metrics for the server, and what is left of those of killed servers.

A server keeps a lock in its folder until it ends, in whatever way. The kernel of the system drops the lock then, so a
lock that can be taken means that the server is gone, whoever has its process id now. The next server of the same user
removes such a folder. A folder without a lock file is never touched: it is not known to be one of these.
"""

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8moe_plugin.checkpoint.untrusted import shown
from fp8moe_plugin.logs import log_once

PREFIX = "fp8moe-metrics-"
LOCK = "server.lock"


def hold_lock(folder: Path) -> int:
    """Lock a new folder for this process.

    The lock file gets its name once it is locked, so that no other server finds it unlocked.

    Returns:
        A descriptor that holds the lock while it is open.
    Raises:
        OSError: the file cannot be made or locked.
    """
    new = folder / f"{LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder / LOCK)
    return descriptor


def remove_stale_folders() -> None:
    """Remove the folders of servers that have ended, if they belong to this user."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_if_stale(path)
        except FileNotFoundError:
            continue  # no lock file, or another server has removed it first
        except OSError as error:
            reason = f"{shown(str(path))}: {error.strerror}"
            log_once(logging.WARNING, f"metrics that a killed server has left are not removed from {reason}")


def _remove_if_stale(path: Path) -> None:
    """Remove a folder of files, and the lock file last, unless its server runs. Follows no links."""
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder, _opened(LOCK, os.O_RDWR, folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
