"""`compile` on a machine with too few resources fails with the reason, and leaves no process behind."""

import errno
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CompileError
from fp8moe_plugin.plan.keys import KernelKey
from warmup import kernels
from warmup.__main__ import main


@pytest.mark.parametrize("limit", [6, 9, 12, 16])
def test_too_few_open_files_are_named(cache: Path, limit: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "warmup"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert done.returncode == 1
    assert done.stderr == "error: Too many open files. Raise the limit of open files (ulimit -n).\n"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOSPC, errno.EACCES])
def test_semaphores_that_cannot_be_made_are_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """As without /dev/shm, or with one that is full or read-only."""

    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refused)
    assert main([]) == 1
    assert capsys.readouterr().err == (
        f"error: The compiling processes need semaphores in /dev/shm, which cannot be created: {os.strerror(code)}. "
        "Mount /dev/shm as a writable tmpfs with free space.\n"
    )


class Stuck(KernelKey):
    """A kernel whose compiler makes no progress: reading it sleeps."""

    def __reduce__(self) -> tuple[object, ...]:
        return time.sleep, (600,)


def test_compiling_that_does_not_progress_ends(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PATIENCE_S", 1)
    with pytest.raises(CompileError, match="No kernel was compiled for 1 s, so the compiling processes were stopped"):
        kernels.compile_missing({Stuck("combine"): "why"})
    assert multiprocessing.active_children() == []


def test_a_compiler_that_cannot_be_imported_fails_its_kernel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a memory limit."""

    def unusable(key: KernelKey) -> None:
        raise ImportError("failed to map segment")

    monkeypatch.setattr(kernels.lookup, "compile_into_cache", unusable)
    found = kernels._compile(KernelKey("combine"))
    assert found == {"state": "failed", "detail": "the compiler could not run: ImportError: failed to map segment"}
