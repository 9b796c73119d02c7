"""Processes that a test has started or killed: whether they run, and how they end with all that they have started."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


def is_running(pid: int) -> bool:
    """Zombies do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


def kill_session(leader: subprocess.Popen[Any]) -> None:
    """Kill a process that was started with `start_new_session`, and all that it has started, such as workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
