"""A command that is interrupted or killed at any moment ends at once and leaves no process behind.

Full count: 200 random moments for each kind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import faults
from tests.processes import is_running
from warmup import interrupts

GRACE_S = 30  # a process that exits by itself first imports for a second, or longer on a busy machine
# Until the command begins, the interpreter itself handles an interrupt. The signal's default action until then makes
# the beginning visible from outside.
BEGIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
print(flush=True)
from warmup.__main__ import main
sys.exit(main())
"""


def processes_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and is_running(int(entry.name)):
            try:
                found += [int(entry.name)] * (os.getsid(int(entry.name)) == session)
            except ProcessLookupError:  # it has ended in the meantime
                continue
    return found


def wait_for_the_end(session: int) -> list[int]:
    """Returns the processes of a session that still run after the grace period."""
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_a_kill_at_any_time_leaves_no_process_behind(cache: Path) -> None:
    command = [sys.executable, "-m", "warmup"]
    draw, until_compiling = faults.draw(), None
    for _ in range(1 + faults.rounds(200)):
        shutil.rmtree(cache, ignore_errors=True)
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if until_compiling is None:
            until_compiling = seconds_until_compiling(cache)
        else:
            time.sleep(draw.uniform(0, 1.2 * until_compiling))
        process.kill()
        process.wait()
        left = wait_for_the_end(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


def seconds_until_compiling(cache: Path) -> float:
    """Seconds until a process has started, finished its imports and locked its first kernel."""
    began = time.monotonic()
    while not list(cache.glob("*.lock")):
        assert time.monotonic() < began + GRACE_S
        time.sleep(0.005)
    return time.monotonic() - began


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Returns a command that has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *arguments, "--json", str(folder / "report.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stdout.readline() == b"\n"
    while not catches_interrupts(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    return process


def catches_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> signal.SIGINT - 1 & 1)


@pytest.mark.parametrize("command", ["compile", "list", "explain"])
def test_an_interrupt_at_any_time_ends_with_one_line(
    full_cache: Path, checkpoint: Callable[[str], Path], tmp_path: Path, command: str
) -> None:
    """`compile` finds one kernel missing; its whole process group gets the interrupt, as from a terminal."""
    (kernel,) = full_cache.glob("combine-*.cubin")
    folder, arguments = tmp_path / "work", [command, "--model", str(checkpoint("DeepSeek-V3"))]
    folder.mkdir()
    report = folder / "report.json"
    messages = {"compile": f"{interrupts.MESSAGE} Finished work is kept; run the command again to continue."}
    messages |= dict.fromkeys(("list", "explain"), interrupts.MESSAGE)
    draw, interrupted, duration = faults.draw(), 0, 0.0
    for attempt in range(1 + faults.rounds(200)):
        report.unlink(missing_ok=True)
        kernel.unlink(missing_ok=True)
        process, began = start(folder, arguments), time.monotonic()
        if attempt:
            time.sleep(draw.uniform(0, duration))
            os.killpg(process.pid, signal.SIGINT)
        _, printed = process.communicate(timeout=60)
        duration = duration or time.monotonic() - began
        errors = printed.decode()
        assert "Traceback" not in errors, errors
        assert "Exception ignored" not in errors
        assert process.returncode in (0, 1), errors
        if process.returncode:
            interrupted += 1
            last = errors.splitlines()[-1]
            assert last in (f"error: {interrupts.MESSAGE}", f"error: {messages[command]}")
            assert errors.count("error: ") == 1
        else:
            assert "error" not in errors
        assert {path.name for path in folder.iterdir()} <= {report.name}
        if report.exists():
            # Also None if the interrupt came after the report was written.
            assert json.loads(report.read_text())["error"] in (None, messages[command])[: 1 + process.returncode]
        assert wait_for_the_end(process.pid) == []
    assert interrupted
    assert not list(full_cache.glob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=str)
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """As under `nohup`, or in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interrupts.raised(number):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_only_the_first_interrupt_is_raised() -> None:
    before, ended = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            ended.append("cleanup")

    with pytest.raises(KeyboardInterrupt), interrupts.raised(signal.SIGINT, signal.SIGTERM):
        work()
    assert ended == ["cleanup"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_within_a_destructor_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        Interrupted()
        time.sleep(60)

    before = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), interrupts.raised(signal.SIGTERM):
        work()
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == before
    assert capsys.readouterr().err == ""


def test_a_signal_that_is_held_back_is_raised_afterwards() -> None:
    done = []

    def work() -> None:
        with interrupts.held_back(signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("block")
        done.append("more")

    with pytest.raises(KeyboardInterrupt), interrupts.raised(signal.SIGINT, signal.SIGTERM):
        work()
    assert done == ["block"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
