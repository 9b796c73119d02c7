"""The cores that engines taking turns run on: the same for all, so that none has a better place for a whole run."""

import contextlib
import os
import re
from pathlib import Path

CORES = 6  # as many as an engine has busy threads, and a few more
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def share_cores() -> None:
    """Let all processes of this process group run on the first cores only, on one hardware thread of each."""
    cores = first_cores(os.sched_getaffinity(0))
    group = os.getpgid(0)
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            if os.getpgid(int(task.parts[2])) == group:
                os.sched_setaffinity(int(task.name), cores)


def first_cores(allowed: set[int]) -> set[int]:
    """One hardware thread of each of the first `CORES` cores among these."""
    taken: set[int] = set()
    found: set[int] = set()
    for thread in sorted(allowed):
        if thread not in taken and len(found) < CORES:
            found.add(thread)
            taken |= siblings(thread)
    return found


def siblings(thread: int) -> set[int]:
    """Returns the hardware threads of its core, as Linux lists them ("0,64" or "0-1"); a sandbox may not tell."""
    listed = Path(SIBLINGS.format(thread))
    text = listed.read_text().strip() if listed.exists() else str(thread)
    spans = (re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(","))
    return {n for span in spans if span for n in range(int(span[1]), int(span[2] or span[1]) + 1)}
