"""The next server removes what killed servers left in the folder for temporary files, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs prometheus_client")

from fp8moe_plugin.layers import metrics, metrics_folder
from fp8moe_plugin.layers.metrics_folder import LOCK, PREFIX, hold_lock, remove_stale_folders, worker_files

# A server: it prints its folder and runs until its input ends.
SERVER = """
import os, sys
from fp8moe_plugin.layers import metrics

metrics.expose()
print(os.environ[metrics.FOLDER], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(metrics_folder.tempfile, "tempdir", None)
    return tmp_path


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in (metrics.FOLDER, metrics.BY_PROMETHEUS)}


@contextmanager
def server() -> Iterator[subprocess.Popen[str]]:
    """A server that is killed at the end if it still runs."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, env=clean_environment(), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def folder_of(process: subprocess.Popen[str]) -> Path:
    """Returns the server's folder, once it exists."""
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def stale_folder(temp: Path, name: str = "old") -> Path:
    """Returns a folder as a killed server leaves it."""
    folder = temp / f"{PREFIX}{name}"
    folder.mkdir()
    os.close(hold_lock(folder))
    (folder / "17.prom").write_text("fp8moe_kernel_misses_total 7.0\n")
    return folder


def test_the_folder_of_a_killed_server_goes_when_the_next_one_starts(temp: Path) -> None:
    with server() as first:
        left = folder_of(first)
        (left / "17.prom").touch()
    assert left.is_dir()
    with server() as second:
        own = folder_of(second)
        assert list(temp.iterdir()) == [own]
        second.communicate()
    assert list(temp.iterdir()) == []


def test_servers_that_start_at_once_keep_their_own_folders(temp: Path) -> None:
    for i in range(50):
        stale_folder(temp, str(i))
    with ExitStack() as running:
        servers = [running.enter_context(server()) for _ in range(3)]
        folders = [folder_of(process) for process in servers]
        assert sorted(temp.iterdir()) == sorted(folders)
        assert all((folder / LOCK).exists() for folder in folders)


def test_the_folder_of_a_running_server_stays(temp: Path) -> None:
    folder = stale_folder(temp)
    (folder / LOCK).unlink()
    lock = hold_lock(folder)
    remove_stale_folders()
    assert sorted(path.name for path in folder.iterdir()) == ["17.prom", LOCK]
    os.close(lock)
    remove_stale_folders()
    assert not folder.exists()


def test_files_of_running_servers_are_found(temp: Path) -> None:
    running = [stale_folder(temp, name) for name in ("one", "two")]
    locks = []
    for folder in running:
        (folder / LOCK).unlink()
        locks.append(hold_lock(folder))
    stale_folder(temp, "killed")
    (temp / f"{PREFIX}notes").mkdir()
    (temp / f"{PREFIX}link").symlink_to(running[0])
    assert sorted(worker_files()) == sorted(folder / "17.prom" for folder in running)
    for lock in locks:
        os.close(lock)
    assert list(worker_files()) == []


def test_a_folder_without_a_lock_file_stays(temp: Path, plugin_log: pytest.LogCaptureFixture) -> None:
    folder = temp / f"{PREFIX}notes"
    folder.mkdir()
    (folder / "17.prom").touch()
    remove_stale_folders()
    assert (folder / "17.prom").exists()
    assert not plugin_log.messages


def test_a_link_is_not_followed(temp: Path) -> None:
    elsewhere = temp / "elsewhere"
    stale_folder(temp).rename(elsewhere)
    (temp / f"{PREFIX}link").symlink_to(elsewhere)
    linked_lock = temp / f"{PREFIX}lock"
    linked_lock.mkdir()
    (linked_lock / LOCK).symlink_to(elsewhere / LOCK)
    remove_stale_folders()
    assert (elsewhere / "17.prom").exists()
    assert (linked_lock / LOCK).is_symlink()


def test_a_link_in_a_folder_goes_and_its_target_stays(temp: Path) -> None:
    target = temp / "target"
    target.touch()
    folder = stale_folder(temp)
    (folder / "18.prom").symlink_to(target)
    remove_stale_folders()
    assert list(temp.iterdir()) == [target]


def test_the_folder_of_another_user_stays(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stale_folder(temp)
    monkeypatch.setattr(metrics_folder.os, "geteuid", lambda: os.getuid() + 1)
    remove_stale_folders()
    assert (folder / "17.prom").exists()


def test_a_folder_that_cannot_be_removed_costs_a_line(temp: Path, plugin_log: pytest.LogCaptureFixture) -> None:
    folder = stale_folder(temp, "\x1b[31m")
    (folder / "below").mkdir()
    remove_stale_folders()
    assert (folder / LOCK).exists()
    (line,) = plugin_log.messages
    assert "the metrics of a killed server could not be removed from" in line
    assert "\x1b" not in line
    assert "directory" in line.lower()
