"""A process that dies while compiling costs the next one only the compilation.

Full count: 200 processes killed at random points while compiling one of our kernels.
"""

import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8moe_plugin.jit import lookup
from fp8moe_plugin.jit.compiler import Compiled, compile_kernel, entry_name, nvrtc_version
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from fp8moe_plugin.plan.sm90.catalog import combine_key
from tests import faults
from tests.jit.conftest import forget, set_variables

FORK = multiprocessing.get_context("fork")  # from a process that has loaded NVRTC: all of a run's time is compiling
KEY = combine_key()
NAME = entry_name(KEY, nvrtc_version())
LONGEST_WAIT_S = 30  # a lock that is waited for costs more


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that will be the cache."""
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "cache")
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each compile in this process."""
    seconds = []

    def timed(key: KernelKey) -> Compiled:
        began = time.perf_counter()
        compiled = compile_kernel(key)
        seconds.append(time.perf_counter() - began)
        return compiled

    monkeypatch.setattr(lookup, "compile_kernel", timed)
    return seconds


def run(kill_after_s: float | None = None) -> int | None:
    """Returns the exit code of a process that looks the kernel up and may be killed while doing so."""
    child = FORK.Process(target=find_or_compile, args=(KEY,), daemon=True)
    child.start()
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        child.kill()
    child.join(timeout=60)
    return child.exitcode


def test_run_after_a_kill_leaves_only_the_entry(folder: Path, compiling: list[float]) -> None:
    cubin = compile_kernel(KEY).cubin
    draw, count, killed, shortest = faults.draw(), faults.rounds(200), 0, math.inf
    for attempt in range(20 * count):
        if killed == count:
            break
        if attempt:
            shutil.rmtree(folder)
        began = time.perf_counter()
        exit_code = run(None if shortest == math.inf else draw.uniform(0, 1.2 * shortest))
        assert exit_code in (0, -signal.SIGKILL)
        if exit_code == 0:
            shortest = min(shortest, time.perf_counter() - began)  # a run may be slow on a busy machine
        else:
            killed += 1
        compiling.clear()
        began = time.perf_counter()
        assert find_or_compile(KEY).cubin == cubin
        assert time.perf_counter() - began - sum(compiling) < LONGEST_WAIT_S
        assert {path.name for path in folder.iterdir()} == {NAME, f"{NAME}.lock"}
        assert find_or_compile(KEY) == (cubin, Origin.CACHE)
    assert killed == count


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_a_kill_while_publishing_leaves_goes_with_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        assert run() == -signal.SIGKILL
    assert len(list(folder.glob("*.part"))) == 1
    assert find_or_compile(KEY).origin == Origin.COMPILER
    assert {path.name for path in folder.iterdir()} == {NAME, f"{NAME}.lock"}
