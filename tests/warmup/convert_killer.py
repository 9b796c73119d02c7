"""Kill conversions and finish them: `python -m tests.warmup.convert_killer SOURCE FOLDER COUNT`.

It is a process without threads, because it forks a process for each conversion. It prints as JSON how many were killed
at each kind of moment, and fails if a finished conversion differs from one that was never killed.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import faults
from tests.warmup.conversion import content
from warmup import convert
from warmup.__main__ import main

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}  # audit events
Prepare = Callable[[], None]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(source: Path, out: Path, prepare: Prepare) -> int:
    """Returns a process that converts, the leader of its own process group."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        prepare()
        os._exit(main(["convert", "--model", str(source), "--out", str(out)]))
    return pid


def wait(pid: int) -> int:
    """Returns the exit code; no process of the group may be left."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return code
    raise AssertionError("the conversion has left processes")


def finish(source: Path, out: Path, wanted: dict[str, bytes]) -> None:
    """Run a killed conversion again until it finishes, unless it had finished before it was killed."""
    if not out.exists() or (out / convert.SOURCE).exists():
        assert wait(start(source, out, lambda: None)) == 0
    assert content(out) == wanted
    assert list(out.parent.iterdir()) == [out]
    shutil.rmtree(out)


def kill_at_change(number: int, folder: Path) -> Prepare:
    """Die just before this change of the files below `folder`."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(arguments[0]).startswith(str(folder)):
            if seen == number:
                die()
            seen += 1

    return lambda: sys.addaudithook(count)


def kill_while_saving() -> None:
    """Die in safetensors, which writes to a temporary file next to its target."""

    def save(tensors: object, path: Path, metadata: object) -> None:
        path.with_name(".tmpAbC123").write_bytes(bytes(1 << 20))
        die()

    convert.save_file = save


def kill_at_each_change(source: Path, out: Path, wanted: dict[str, bytes]) -> int:
    for number in range(1000):
        if wait(start(source, out, kill_at_change(number, out.parent))) == 0:
            shutil.rmtree(out)
            return number
        finish(source, out, wanted)
    raise AssertionError("a conversion changes too many files")


def kill_at_random(source: Path, out: Path, wanted: dict[str, bytes], count: int, seconds: float) -> Counter[str]:
    """Some conversions are killed several times before they may finish, and enough of them at work.

    `seconds` is what one took that was not killed. Others may be slower, beside other work.
    """
    draw, killed = faults.draw(), Counter[str]()
    while killed.total() < count or killed["at work"] <= count / 10:
        pid = start(source, out, lambda: None)
        time.sleep(draw.uniform(0, 1.2 * seconds))
        os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        assert code in (0, -signal.SIGKILL)
        if code:
            at_work = out.with_name(f"{out.name}.partial").exists()
            killed["at work" if at_work else "outside"] += 1
            seconds *= 1 if at_work else 1.05
        if out.exists() or draw.random() < 0.5:
            finish(source, out, wanted)
    if any(out.parent.iterdir()):
        finish(source, out, wanted)
    return killed


def run(source: Path, folder: Path, count: int) -> dict[str, Any]:
    folder.mkdir()
    torch.set_num_threads(1)  # also in the conversions, whose threads would spin on few cores
    out = folder / "fp8"
    began = time.perf_counter()
    assert wait(start(source, out, lambda: None)) == 0
    seconds, wanted = time.perf_counter() - began, content(out)
    shutil.rmtree(out)
    assert wait(start(source, out, kill_while_saving)) == -signal.SIGKILL
    finish(source, out, wanted)
    changes = kill_at_each_change(source, out, wanted)
    return {"changes": changes, "random": kill_at_random(source, out, wanted, count, seconds)}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
