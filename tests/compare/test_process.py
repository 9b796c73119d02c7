"""Engines in their own processes; these need no GPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.compare.process import LONGEST_ERROR, EngineError, EngineProcess
from tests.processes import is_running

LONG = 120  # seconds, only to end a hang


class Engine:
    """Counts, or fails on demand."""

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

    def fail_on_purpose(self) -> None:
        raise EngineError("no answer. Check the URL.")

    def fail_at_length(self) -> None:
        raise RuntimeError("x" * 10_000)

    def fail_loudly(self) -> None:
        print("a line on stdout", flush=True)
        self.fail()

    def fail_without_stderr(self) -> None:
        os.close(2)
        raise RuntimeError("out of memory")

    def end(self) -> None:
        os._exit(3)

    def fork_and_end(self) -> None:
        if os.fork():
            os._exit(3)
        time.sleep(2 * LONG)

    def start_child(self) -> int:
        print("a line that belongs to the engine", flush=True)
        return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({2 * LONG})"]).pid

    def kill_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(2 * LONG)

    def sleep(self) -> None:
        time.sleep(2 * LONG)


Start = Callable[..., EngineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    processes = []

    def start(make: Callable[[], Any] = Engine, environment: dict[str, str] | None = None) -> EngineProcess:
        processes.append(EngineProcess(make, environment or {}))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


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


def test_start_time_does_not_depend_on_the_query(start: Start) -> None:
    begin = time.monotonic()
    process = start()
    assert process._connection.poll(LONG)
    asked = time.monotonic()
    assert begin < process.wait_until_made(LONG) < asked


def test_output_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = EngineProcess(Engine, {}, tmp_path / "engine.log")
    try:
        process.start()
        process.wait_until_made(LONG)
        with pytest.raises(EngineError, match=r"^RuntimeError: out of memory$"):
            process.call("fail_loudly", timeout=LONG)
    finally:
        process.kill()
    log = (tmp_path / "engine.log").read_text()
    assert "a line on stdout" in log
    assert "Traceback" in log
    assert capfd.readouterr() == ("", "")


def test_an_engine_that_cannot_be_made_says_why(start: Start) -> None:
    process = start(partial(Engine, "no such\ncheckpoint \x1b[31m"))
    with pytest.raises(EngineError, match=r"^ValueError: no such checkpoint \\x1b\[31m$"):
        process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^ended with status -9$"):
        process.call("add", 1, timeout=LONG)


def test_a_call_that_fails_says_why_and_ends_the_engine(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    process = start()
    process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^RuntimeError: out of memory$"):
        process.call("fail", timeout=LONG)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"^ended with status -9$"):
            process.call("add", 1, timeout=LONG)
    assert "Traceback" in capfd.readouterr().err


def test_an_error_that_an_engine_raises_on_purpose_is_unchanged(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start()
    process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^no answer\. Check the URL\.$"):
        process.call("fail_on_purpose", timeout=LONG)
    assert capfd.readouterr().err == ""


def test_a_long_error_is_cut_visibly(start: Start) -> None:
    process = start()
    process.wait_until_made(LONG)
    with pytest.raises(EngineError, match=r"^RuntimeError: x+\.\.\.$") as caught:
        process.call("fail_at_length", timeout=LONG)
    assert len(str(caught.value)) == LONGEST_ERROR


@pytest.mark.parametrize("end", ["end", "fork_and_end"])
def test_a_process_that_ends_is_noticed_and_leaves_nothing(start: Start, end: str) -> None:
    process = start()
    process.wait_until_made(LONG)
    child = process.call("start_child", timeout=LONG)
    assert is_running(child)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"^ended with status 3$"):
            process.call(end, timeout=LONG)
    wait_until(lambda: not is_running(child))


def test_engine_timeout_kills_its_children(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    process = start()
    process.wait_until_made(LONG)
    child = process.call("start_child", timeout=LONG)
    assert is_running(child)
    with pytest.raises(EngineError, match=r"^not done within 0\.2 s$"):
        process.call("sleep", timeout=0.2)
    wait_until(lambda: not is_running(child))
    with pytest.raises(EngineError, match=r"^ended with status -9$"):
        process.call("add", 1, timeout=LONG)
    out, err = capfd.readouterr()
    assert out == ""
    assert "a line that belongs to the engine" in err


PARENT = """
import os
import signal
from fp8moe_plugin.compare.process import EngineProcess
from tests.compare.test_process import LONG, Engine
if __name__ == "__main__":
    process = EngineProcess(Engine, {})
    process.start()
    process.wait_until_made(LONG)
    print(process.call("start_child", timeout=LONG), flush=True)
    input()
    END
"""


@pytest.mark.parametrize(
    "end", ["raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)", "process.call('kill_parent', timeout=LONG)"]
)
@pytest.mark.parametrize("stderr", [None, subprocess.PIPE])
def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path, end: str, stderr: int | None) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.replace("END", end))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    command = [sys.executable, script]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=stderr) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if parent.stderr is not None:
            parent.stderr.close()  # nobody reads the engine's output any more
        parent.stdin.write(b"go on\n")
        parent.stdin.close()
        try:
            parent.wait(LONG)
        finally:
            parent.kill()
    wait_until(lambda: not is_running(child))
