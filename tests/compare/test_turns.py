"""Engines that start: what is said meanwhile, and what remains of an interrupt. The processes are real."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fp8moe_plugin.compare import turns
from fp8moe_plugin.compare.process import EngineProcess
from fp8moe_plugin.compare.turns import Engines

LONG = 120  # seconds, only to end a hang


class Engine:
    """Is ready once there is a file, if it wants one."""

    def __init__(self, wanted: Path | None) -> None:
        while wanted and not wanted.exists():
            time.sleep(0.02)


Make = Callable[[Callable[[], None]], tuple[Engines, list[str]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes two engines, of which `slow` waits for the file `go`, and the list of what is said about them.

    Its argument is called when only `slow` is said to be missing.
    """
    monkeypatch.setattr(turns, "PATIENCE_S", 0.1)
    wanted = {"slow": tmp_path / "go", "fast": None}
    processes = {name: EngineProcess(partial(Engine, path), {}) for name, path in wanted.items()}

    def make(react: Callable[[], None]) -> tuple[Engines, list[str]]:
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            if line.endswith(": slow"):
                react()

        return Engines(processes, LONG, say), lines

    yield make
    for process in processes.values():
        process.kill()


def test_while_engines_start_the_missing_ones_are_named(make: Make, tmp_path: Path) -> None:
    engines, lines = make((tmp_path / "go").touch)
    engines.start()
    missing = [line.rpartition(": ")[2] for line in lines if line.startswith("not ready after")]
    assert set(missing) <= {"slow, fast", "slow"}
    assert engines.found["fast"]["ready_s"] <= engines.found["slow"]["ready_s"]
    assert [line.split()[0] for line in lines if "was ready" in line] == ["slow", "fast"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python does not raise KeyboardInterrupt if a shell started it in the background, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_says_which_engine_was_not_ready(make: Make) -> None:
    engines, _ = make(partial(os.kill, os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engines.start()
    assert engines.found["slow"]["error"].startswith("interrupted after ")
    assert engines.found["slow"]["error"].endswith(" s, before it was ready")
    assert engines.found["fast"] == {"ready_s": engines.found["fast"]["ready_s"]}
