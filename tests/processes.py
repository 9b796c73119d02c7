"""Whether a process that a test has started or killed still runs."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Zombies do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False
