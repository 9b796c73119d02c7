"""benchmarks.engine_process: engines in processes of their own, here ones that need no GPU."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_process import EngineError, EngineProcess

LONG = 600  # seconds: only against a hang


class Engine:
    """Counts, or fails as it is told to."""

    def __init__(self, failure: str = "") -> None:
        if failure:
            raise ValueError(failure)
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self) -> None:
        raise RuntimeError("out of memory")

    def end(self) -> None:
        os._exit(3)

    def start_child(self, started: Path) -> None:
        print("a line that belongs to the engine", flush=True)
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG})"])
        started.write_text(str(child.pid))
        time.sleep(LONG)


Start = Callable[..., EngineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    processes = []

    def start(make: Callable[[], Any] = Engine, environment: dict[str, str] | None = None) -> EngineProcess:
        processes.append(EngineProcess(make, environment or {}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_engine_keeps_its_state_and_has_an_environment_of_its_own(start: Start) -> None:
    first, second = (start(environment={"TEST_ENGINE": name}) for name in "ab")
    first.wait_until_made(LONG)
    second.wait_until_made(LONG)
    assert [first.call("add", 1, timeout=LONG), second.call("add", 5, timeout=LONG)] == [1, 5]
    assert first.call("add", 1, timeout=LONG) == 2
    assert [e.call("environment", "TEST_ENGINE", timeout=LONG) for e in (first, second)] == ["a", "b"]
    assert "TEST_ENGINE" not in os.environ


def test_an_engine_that_cannot_be_made_says_why(start: Start) -> None:
    process = start(partial(Engine, "no such checkpoint"))
    with pytest.raises(EngineError, match=r"^ValueError: no such checkpoint$"):
        process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^ended with status 0$"):
        process.call("add", 1, timeout=LONG)


def test_a_call_that_fails_says_why(start: Start) -> None:
    process = start()
    process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^RuntimeError: out of memory$"):
        process.call("fail", timeout=LONG)


def test_a_process_that_ends_is_noticed(start: Start) -> None:
    process = start()
    process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^ended with status 3$"):
        process.call("end", timeout=LONG)


def test_an_engine_that_takes_too_long_is_killed_with_all_it_has_started(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process, started = start(), tmp_path / "pid"
    process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^not done within 0\.2 s$"):
        process.call("start_child", started, timeout=0.2)
    wait_until(lambda: started.exists() and bool(started.read_text()))
    child = int(started.read_text())
    assert is_running(child)
    process.kill()
    wait_until(lambda: not is_running(child))
    out, err = capfd.readouterr()
    assert out == ""
    assert "a line that belongs to the engine" in err
