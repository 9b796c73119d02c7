"""How many rounds fault tests run, and which.

`make faults` sets FULL_COUNTS=1 and runs as many rounds as the tests' docstrings say. Other runs do a fiftieth of them,
at least ten, with other random numbers each day. Pytest's header shows the seed; FAULT_SEED=<seed> repeats the run.
"""

import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

FULL = bool(os.environ.get("FULL_COUNTS"))
# In the environment, so that pytest's workers and their child processes have the same seed around midnight.
SEED = int(os.environ.setdefault("FAULT_SEED", str(datetime.now(UTC).toordinal())))
Case = TypeVar("Case")


def rounds(full: int) -> int:
    return full if FULL else max(10, full // 50)


def draw() -> random.Random:
    return random.Random(SEED)


def cases_of_today(cases: Iterable[Case], count: int) -> list[Case]:
    """All cases under FULL_COUNTS=1, otherwise `count` of them, which rotate from day to day."""
    cases = list(cases)
    return cases if FULL else [cases[(SEED * count + i) % len(cases)] for i in range(min(count, len(cases)))]
