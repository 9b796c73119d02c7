"""benchmarks.engine.cores: engines that take turns run on the same cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine import cores

SHARE = """
import os, subprocess, sys, threading
os.setpgid(0, 0)
child = subprocess.Popen(["sleep", "60"])
event = threading.Event()
threading.Thread(target=event.wait, daemon=True).start()
from benchmarks.engine import cores
cores.CORES = 1
cores.share_cores()
found = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
print(sorted({len(each) for each in (*found, os.sched_getaffinity(child.pid))}), len(found))
child.kill()
"""


@pytest.fixture
def topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight cores with two threads each: 0 and 8, 1 and 9, ..."""
    for thread in range(16):
        (tmp_path / str(thread)).write_text(f"{thread % 8},{thread % 8 + 8}\n")
    monkeypatch.setattr(cores, "SIBLINGS", str(tmp_path / "{}"))


@pytest.mark.usefixtures("topology")
def test_one_thread_of_each_core_is_taken():
    assert cores.first_cores(set(range(16))) == {0, 1, 2, 3, 4, 5}
    assert cores.first_cores({9, 1, 10, 3}) == {1, 3, 10}


@pytest.mark.parametrize(("text", "found"), [("3", {3}), ("0,64", {0, 64}), ("2-3", {2, 3}), ("0-1,8-9", {0, 1, 8, 9})])
def test_siblings_are_read_as_linux_lists_them(monkeypatch, tmp_path, text, found):
    (tmp_path / "0").write_text(text + "\n")
    monkeypatch.setattr(cores, "SIBLINGS", str(tmp_path / "{}"))
    assert cores.siblings(0) == found


def test_where_siblings_are_not_told_each_thread_is_a_core(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "SIBLINGS", str(tmp_path / "{}"))
    assert cores.first_cores(set(range(9))) == {0, 1, 2, 3, 4, 5}


def test_all_threads_and_children_share_the_cores_and_no_other_process():
    before = os.sched_getaffinity(0)
    done = subprocess.run([sys.executable, "-c", SHARE], capture_output=True, text=True, timeout=60, check=True)
    widths, threads = done.stdout.rsplit(maxsplit=1)
    assert widths == "[1]"
    assert int(threads) >= 2
    assert os.sched_getaffinity(0) == before
