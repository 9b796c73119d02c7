"""Commands whose standard streams are closed, full or broken: what they do and report stays the same."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import faults

LOST = "error: Standard output cannot be written: No space left on device. "
STREAMS = {"stdout": [1], "stderr": [2], "all": [0, 1, 2], "both": [1, 2], "stdin": [0]}
COMMANDS = ("compile", "list", "verify", "explain", "doctor", "bundle")
CHANGING = ("seconds", "created", "available_bytes")  # fields that differ from run to run


class Outcome(NamedTuple):
    status: int
    report: dict[str, Any]
    files: set[str]
    errors: bytes  # what was printed as such


class Run:
    """A command with a cache of its own, which lacks one kernel, so that compiling starts processes."""

    def __init__(self, folder: Path, cache: Path, arguments: list[str], broken: list[int], state: str) -> None:
        self.folder = folder
        shutil.copytree(cache, folder / "cache")
        next((folder / "cache").glob("combine-*.cubin")).unlink()
        command = [sys.executable, "-m", "warmup", *arguments, "--json", str(folder / "report.json")]
        command += ["--bundle", str(folder / "kernels.tar")] if arguments[0] == "bundle" else []
        full = {number: os.open("/dev/full", os.O_RDWR) for number in broken if state == "full"}
        pipes = {number: broken_pipe(number) for number in broken if state == "broken pipe"}
        given = {0: subprocess.DEVNULL, 1: subprocess.PIPE, 2: subprocess.PIPE, **full, **pipes}
        self.process = subprocess.Popen(
            command,
            stdin=given[0],
            stdout=given[1],
            stderr=given[2],
            env={**os.environ, "FP8MOE_CACHE_DIR": str(folder / "cache")},
            preexec_fn=lambda: [os.close(number) for number in broken if state == "closed"] and None,
        )
        for descriptor in (*full.values(), *pipes.values()):
            os.close(descriptor)

    def outcome(self) -> Outcome:
        _, errors = self.process.communicate(timeout=120)
        text = (self.folder / "report.json").read_text().replace(str(self.folder), "FOLDER")
        report = json.loads(text, object_hook=lambda found: found | dict.fromkeys(CHANGING))
        files = {path.name for path in self.folder.rglob("*")}
        return Outcome(self.process.returncode, report, files, errors or b"")


def broken_pipe(number: int) -> int:
    """One end of a pipe whose other end is closed."""
    reader, writer = os.pipe()
    ours, theirs = (reader, writer) if number == 0 else (writer, reader)
    os.close(theirs)
    return ours


@pytest.fixture(scope="module")
def healthy(
    filled: Path, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outcome]:
    """The outcome of a command with all its streams."""

    @functools.cache
    def outcome(command: str) -> Outcome:
        return Run(tmp_path_factory.mktemp("healthy"), filled, arguments(command, checkpoint), [], "").outcome()

    return outcome


def arguments(command: str, checkpoint: Callable[[str], Path]) -> list[str]:
    return [command, "--model", str(checkpoint("DeepSeek-V3"))]


@pytest.mark.parametrize("state", ["closed", "full", "broken pipe"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_the_same_whatever_its_streams_are(
    filled: Path,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    healthy: Callable[[str], Outcome],
    command: str,
    state: str,
) -> None:
    """Full count: every set of streams."""
    names = faults.cases_of_today(STREAMS, 3)
    for name in names:
        (tmp_path / name).mkdir()
    runs = {name: Run(tmp_path / name, filled, arguments(command, checkpoint), STREAMS[name], state) for name in names}
    expected = healthy(command)
    assert expected.status == (1 if command == "verify" else 0)
    for name, run in runs.items():
        found = run.outcome()
        lost = state == "full" and 1 in STREAMS[name]
        assert found.status == (1 if lost else expected.status), name
        assert (LOST.encode() in found.errors) == (lost and 2 not in STREAMS[name]), name
        assert bool(found.report["error"]) == lost, name
        assert found.report | {"error": None} == expected.report, name
        assert found.files == expected.files, name
        assert b"Traceback" not in found.errors
        assert b"Exception ignored" not in found.errors


def test_what_nobody_reads_of_a_long_output_changes_no_status(filled: Path) -> None:
    """The reader may close the pipe before or after the last line; both must have the same outcome."""
    command = [sys.executable, "-m", "warmup", "list"]
    process = subprocess.Popen(
        command,
        stdout=broken_pipe(1),
        stderr=subprocess.PIPE,
        env={**os.environ, "FP8MOE_CACHE_DIR": str(filled), "PYTHONUNBUFFERED": "1"},
    )
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_a_pipe_that_nobody_empties_does_not_stop_the_work(filled: Path) -> None:
    """A non-blocking pipe; a blocking one makes the writer wait."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        while pipe.write(bytes(4096)):
            pass
        environment = {**os.environ, "FP8MOE_CACHE_DIR": str(filled)}
        command = [sys.executable, "-m", "warmup", "list"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, env=environment, timeout=60)
    os.close(reader)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: Standard output cannot be written: Resource temporarily unavailable. ")
