"""With a full, unreadable, foreign or missing folder, or a wrong clock, kernels are served with at most one warning."""

import itertools
import multiprocessing
import os
import pwd
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fp8moe_plugin.jit import cache, lookup
from fp8moe_plugin.jit.compiler import Compiled, compile_kernel, entry_name, nvrtc_version
from fp8moe_plugin.jit.lookup import Found, Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables

FORK = multiprocessing.get_context("fork")
KEPT, NEW = KEYS = [KernelKey("tiny", (("VALUE", value),)) for value in (3, 4)]
ROOT = os.geteuid() == 0
NOBODY = 12345
DISK_BYTES = 1 << 16


class Served(NamedTuple):
    kernels: list[Found]
    warnings: list[str]


class Server:
    """Looks up both kernels, here or in another process."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    def serve(self) -> Served:
        self.caplog.clear()
        return Served([find_or_compile(key) for key in KEYS], self.caplog.messages)

    def serve_after(self, prepare: Callable[[], object]) -> Served:
        """Returns the same in another process, after `prepare`."""
        receiver, sender = FORK.Pipe(duplex=False)
        child = FORK.Process(target=lambda: (prepare(), sender.send(self.serve())))
        child.start()
        sender.close()
        served = receiver.recv()
        child.join()
        return served


@pytest.fixture
def server(plugin_log: pytest.LogCaptureFixture) -> Server:
    return Server(plugin_log)


@pytest.fixture
def cubins(kernels: Path) -> list[bytes]:
    return [compile_kernel(key).cubin for key in KEYS]


@pytest.fixture
def home(kernels: Path) -> Iterator[Path]:
    """The folder of a user who is not root."""
    with tempfile.TemporaryDirectory() as folder:
        if ROOT:
            os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


@pytest.fixture
def disk(kernels: Path) -> Iterator[Path]:
    """The cache, on its own file system of a few pages."""
    if not ROOT:
        pytest.skip("only root can mount a file system")
    kernels.mkdir(mode=0o700)
    options = f"size={DISK_BYTES},mode=700"
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", kernels], capture_output=True, text=True)
    if mounting.returncode:
        pytest.skip(f"no file system can be mounted here: {mounting.stderr}")
    yield kernels
    subprocess.run(["umount", kernels], check=True)


def become_nobody() -> None:
    if ROOT:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def name(key: KernelKey) -> str:
    return entry_name(key, nvrtc_version())


def state(folder: Path) -> dict[str, int]:
    """Returns a value that changes with any write."""
    return {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}


def assert_served(served: Served, cubins: list[bytes], origins: list[Origin], warning: str) -> None:
    assert served.kernels == list(zip(cubins, origins, strict=True))
    assert len(served.warnings) == 1
    assert warning in served.warnings[0]


def test_a_write_that_is_cut_short_leaves_no_entry(kernels: Path, cubins: list[bytes], server: Server) -> None:
    limit = len(cubins[0]) // 2
    served = server.serve_after(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert_served(served, cubins, [Origin.COMPILER] * 2, f"but not cached: {kernels} cannot be written: File too large")
    assert {path.name for path in kernels.iterdir()} == {f"{name(key)}.lock" for key in KEYS}


def test_a_full_disk_leaves_no_entry(
    disk: Path, cubins: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [cubin + bytes(DISK_BYTES) for cubin in cubins]
    compiled = {key: Compiled(cubin, []) for key, cubin in zip(KEYS, large, strict=True)}
    monkeypatch.setattr(lookup, "compile_kernel", compiled.__getitem__)
    served = server.serve()
    assert_served(served, large, [Origin.COMPILER] * 2, f"{disk} cannot be written: No space left on device")
    assert {path.name for path in disk.iterdir()} == {f"{name(key)}.lock" for key in KEYS}


def test_a_file_system_that_is_mounted_read_only_still_serves_hits(
    disk: Path, cubins: list[bytes], server: Server
) -> None:
    find_or_compile(KEPT)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    served = server.serve()
    warning = f"{disk} cannot be written: Read-only file system"
    assert_served(served, cubins, [Origin.CACHE, Origin.COMPILER], warning)


def test_a_read_only_folder_still_serves_hits(
    home: Path, cubins: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "cache"
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=folder)

    def close() -> None:
        become_nobody()
        find_or_compile(KEPT)
        for left in (".lock", ".0123456789abcdef.part"):  # by a process that died
            (folder / f"{name(NEW)}{left}").touch(0o600)
        folder.chmod(0o500)

    served = server.serve_after(close)
    warning = f"{folder} cannot be written: Permission denied"
    assert_served(served, cubins, [Origin.CACHE, Origin.COMPILER], warning)


def test_a_folder_that_cannot_be_made_costs_one_warning(
    home: Path, cubins: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "closed" / "cache"
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=folder)

    def close() -> None:
        become_nobody()
        folder.parent.mkdir(mode=0o500)

    served = server.serve_after(close)
    assert_served(served, cubins, [Origin.COMPILER] * 2, f"{folder} cannot be written: Permission denied")


@pytest.mark.parametrize("there", [True, False], ids=["there", "new"])
def test_a_umask_without_any_permission_costs_nothing(
    home: Path, cubins: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    folder = home / "new" / "cache"
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=folder)

    def mask() -> None:
        become_nobody()
        if there:
            folder.mkdir(mode=0o700, parents=True)
        os.umask(0o777)

    compiled, kept = [[(cubin, origin) for cubin in cubins] for origin in (Origin.COMPILER, Origin.CACHE)]
    assert server.serve_after(mask) == (compiled, [])
    assert server.serve_after(become_nobody) == (kept, [])


def test_a_user_without_a_home_is_told_what_to_do(
    cubins: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "FP8MOE_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    set_variables(monkeypatch)
    served = server.serve_after(become_nobody)
    warning = "Set FP8MOE_CACHE_DIR to a folder of your own with mode 0700, or serve from a bundle"
    assert_served(served, cubins, [Origin.COMPILER] * 2, warning)


def test_a_folder_of_another_user_is_neither_read_nor_written(
    kernels: Path, cubins: list[bytes], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_or_compile(KEPT)
    if ROOT:
        os.chown(kernels, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    before = state(kernels)
    assert_served(server.serve(), cubins, [Origin.COMPILER] * 2, f"{kernels} is not used: it belongs to user")
    assert state(kernels) == before


@pytest.mark.parametrize("when", [0, 2**32], ids=["1970", "2106"])
def test_an_entry_is_a_hit_whatever_its_time(kernels: Path, cubins: list[bytes], server: Server, when: int) -> None:
    server.serve()
    for path in (kernels, *kernels.iterdir()):
        os.utime(path, (when, when))
    assert server.serve() == ([(cubin, Origin.CACHE) for cubin in cubins], [])


@pytest.mark.parametrize(("held_s", "timeout_s"), [(0.3, 60), (60, 0.3)], ids=["released", "given-up"])
def test_a_lock_is_waited_for_by_no_clock_that_can_be_set(
    kernels: Path, cubins: list[bytes], monkeypatch: pytest.MonkeyPatch, held_s: float, timeout_s: float
) -> None:
    holds = FORK.Event()

    def hold() -> None:
        with cache.locked(name(KEPT)):
            holds.set()
            time.sleep(held_s)

    holder = FORK.Process(target=hold, daemon=True)
    holder.start()
    assert holds.wait(60)
    backwards = itertools.count(time.time(), -3600)
    monkeypatch.setattr(time, "time", lambda: next(backwards))
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", timeout_s)
    began = time.monotonic()
    assert find_or_compile(KEPT) == (cubins[0], Origin.COMPILER)
    assert time.monotonic() - began < 30  # neither waits for 60
    assert find_or_compile(KEPT) == (cubins[0], Origin.CACHE)
    holder.kill()
    holder.join()
