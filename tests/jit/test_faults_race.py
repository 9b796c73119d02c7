"""Processes that start together on an empty cache compile each kernel once, and none ever gets a wrong byte.

Full counts: 1,000 rounds of 16 processes and 3 kernels; 500 with locks that time out, 500 on a file system that has no
locks, and 100 with entries that are seen late.
"""

import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock, Timeout

from fp8moe_plugin.jit import cache, lookup
from fp8moe_plugin.jit.compiler import Compiled, compile_kernel
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests import faults

FORK = multiprocessing.get_context("fork")
PROCESSES = 16
ROUNDS = faults.rounds(1000)
LOCKLESS_ROUNDS = faults.rounds(500)
LATE_ROUNDS = faults.rounds(100)
KEYS = [KernelKey("tiny", (("VALUE", value),)) for value in (3, 4, 5)]
PIECES = 1 << 13  # of 32 bytes: many pages, so that a torn read shows
LATE_S = 0.05


class Race:
    """Processes that look up all keys in each round, starting with an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled = folder.with_name("compiled")
        self.header = compile_kernel(KEYS[0]).cubin

    def compile(self, key: KernelKey) -> Compiled:
        """Stands in for the compiler; returns different bytes in each process."""
        with self.compiled.open("a") as file:
            file.write(f"{key}\n")
        return Compiled(self.cubin(key, os.getpid()), [])

    def cubin(self, key: KernelKey, process: int) -> bytes:
        return self.header + (hashlib.sha256(str(key).encode()).digest()[:24] + process.to_bytes(8)) * PIECES

    def run(self, rounds: int) -> Counter[str]:
        """Returns how often each key was compiled, over all rounds and processes."""
        barrier = FORK.Barrier(PROCESSES, action=self.clear, timeout=60)
        racers = [FORK.Process(target=self.race, args=(barrier, rounds), daemon=True) for _ in range(PROCESSES)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert [racer.exitcode for racer in racers] == [0] * PROCESSES
        return Counter(self.compiled.read_text().splitlines())

    def race(self, barrier: Barrier, rounds: int) -> None:
        draw = random.Random(faults.SEED + os.getpid())
        try:
            for _ in range(rounds):
                barrier.wait()
                for key in draw.sample(KEYS, len(KEYS)):
                    self.look_up(key)
            barrier.wait()
        except BaseException:
            barrier.abort()
            raise

    def look_up(self, key: KernelKey) -> None:
        cubin, origin = find_or_compile(key)
        maker = int.from_bytes(cubin[-8:])
        assert cubin == self.cubin(key, maker)
        assert (maker == os.getpid()) == (origin == Origin.COMPILER)  # a process uses what it compiled

    def clear(self) -> None:
        """Empty the folder between two rounds, in one process while the others wait."""
        assert not list(self.folder.glob("*.part"))
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def race(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Race:
    def refuse(text: str, *values: object) -> None:
        raise AssertionError(text % values)

    race = Race(kernels)
    monkeypatch.setattr(lookup, "compile_kernel", race.compile)
    monkeypatch.setattr(cache, "LOCK_PATIENCE_S", cache.LOCK_TIMEOUT_S)  # 16 processes may wait for longer
    monkeypatch.setattr(lookup.logger, "warning", refuse)  # a damaged entry and one that was not kept cost a warning
    return race


def test_each_kernel_is_compiled_once(race: Race) -> None:
    assert race.run(ROUNDS) == {str(key): ROUNDS for key in KEYS}


@pytest.mark.parametrize("error", [Timeout("lock"), NotImplementedError()], ids=["timed-out", "not-there"])
def test_without_locks_there_are_more_compiles_and_no_wrong_byte(
    race: Race, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def acquire(_: FileLock) -> None:
        raise error

    monkeypatch.setattr(cache, "_acquire", acquire)
    assert race.run(LOCKLESS_ROUNDS).total() > LOCKLESS_ROUNDS * len(KEYS)


def test_who_sees_an_entry_late_uses_its_own(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = cache._file

    def late(name: str, folder: int) -> BinaryIO:
        if time.time() - os.stat(name, dir_fd=folder).st_ctime < LATE_S:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return opened(name, folder)

    monkeypatch.setattr(cache, "_file", late)
    assert race.run(LATE_ROUNDS).total() > LATE_ROUNDS * len(KEYS)
