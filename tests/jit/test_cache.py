"""Compiled kernels on disk: complete or absent, never wrong, never from another user."""

import errno
import os
import stat
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import cache
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables

NAME = "tiny-0123.cubin"


@pytest.fixture
def cubin(kernels: Path) -> bytes:
    return compile_kernel(KernelKey("tiny", (("VALUE", 3),))).cubin


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_published_is_read(kernels: Path, cubin: bytes) -> None:
    cache.publish(NAME, cubin)
    assert cache.read(NAME) == cubin
    assert files(kernels) == {NAME}


def test_reading_writes_nothing(kernels: Path, cubin: bytes) -> None:
    with pytest.raises(cache.Missing, match=f"^{kernels} does not contain it$"):
        cache.read(NAME)
    assert not kernels.exists()
    cache.publish(NAME, cubin)
    before = [(p.name, p.stat().st_mtime_ns) for p in [kernels, *kernels.iterdir()]]
    assert cache.read(NAME) == cubin
    assert [(p.name, p.stat().st_mtime_ns) for p in [kernels, *kernels.iterdir()]] == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_matter_of_modes(
    kernels: Path, cubin: bytes, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache, "write_whole", full)
    with pytest.raises(CacheError, match=rf"cannot be written: {os.strerror(code)}\. Free space there, or set "):
        cache.publish(NAME, cubin)


def test_entries_are_private(kernels: Path, cubin: bytes) -> None:
    with cache.locked(NAME):
        cache.publish(NAME, cubin)
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in kernels.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (b"", "its checksum differs"),
        (b"short", "its checksum differs"),
        (cache.seal("other", b"\x7fELF"), "its checksum differs"),
        (cache.seal(NAME, b""), "not a 64-bit ELF file"),
        (cache.seal(NAME, b"#!/bin/sh\n" + bytes(100)), "not a 64-bit ELF file"),
        (cache.seal(NAME, b"\x7fELF\x02\x01" + bytes(100)), "not machine code for CUDA"),
    ],
)
def test_an_entry_that_is_no_cubin_of_this_name_is_damaged(kernels: Path, entry: bytes, fault: str) -> None:
    kernels.mkdir(mode=0o700)
    (kernels / NAME).write_bytes(entry)
    with pytest.raises(cache.Damaged, match=f"{NAME} is damaged: {fault}"):
        cache.read(NAME)


def test_code_for_another_gpu_is_damaged(kernels: Path, cubin: bytes) -> None:
    cache.publish(NAME, cubin[:49] + bytes([80]) + cubin[50:])
    with pytest.raises(cache.Damaged, match="machine code for sm_80, not for sm_90"):
        cache.read(NAME)


def test_a_link_in_the_place_of_an_entry_is_not_followed(kernels: Path, cubin: bytes, tmp_path: Path) -> None:
    kernels.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_bytes(cache.seal(NAME, cubin))
    (kernels / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(cache.Missing, match="cannot be read: Too many levels of symbolic links"):
        cache.read(NAME)


def test_a_pipe_in_the_place_of_an_entry_does_not_block(kernels: Path) -> None:
    kernels.mkdir(mode=0o700)
    os.mkfifo(kernels / NAME)
    with pytest.raises(cache.Damaged, match="its checksum differs"):
        cache.read(NAME)


def assert_refused(cubin: bytes, refusal: str) -> None:
    with pytest.raises(cache.Missing, match=refusal):
        cache.read(NAME)
    with pytest.raises(CacheError, match=refusal):
        cache.publish(NAME, cubin)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_not_used(kernels: Path, cubin: bytes, mode: int) -> None:
    cache.publish(NAME, cubin)
    kernels.chmod(mode)
    refusal = f"{kernels} is not used: its mode {mode:04o} lets other users write to it"
    assert_refused(cubin, refusal)


def test_a_folder_of_another_user_is_not_used(kernels: Path, cubin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        kernels.mkdir(mode=0o700)
        os.chown(kernels, 12345, -1)
        owner = 12345
    else:
        set_variables(monkeypatch, FP8MOE_CACHE_DIR="/usr")
        owner = 0
    refusal = f"is not used: it belongs to user {owner}, but this process runs as user {os.geteuid()}"
    assert_refused(cubin, refusal)


def test_a_failed_publish_leaves_no_file_behind(kernels: Path, cubin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=f"^{kernels} cannot be written: No space left on device"):
        cache.publish(NAME, cubin)
    assert files(kernels) == set()


def test_what_a_dead_process_left_goes_with_the_next_lock(kernels: Path, cubin: bytes) -> None:
    kernels.mkdir(mode=0o700)
    for name in (f"{NAME}.0123456789abcdef.part", "other-0123.cubin.0123456789abcdef.part"):
        (kernels / name).write_bytes(b"half")
    with cache.locked(NAME):
        cache.publish(NAME, cubin)
    assert files(kernels) == {NAME, f"{NAME}.lock", "other-0123.cubin.0123456789abcdef.part"}


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"FP8MOE_CACHE_DIR": "/a", "VLLM_CACHE_ROOT": "/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/a"),
        ({"VLLM_CACHE_ROOT": "/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/b/fp8moe"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/fp8moe"),
        ({"HOME": "/d"}, "/d/.cache/fp8moe"),
        ({"FP8MOE_CACHE_DIR": "~/x", "HOME": "/d"}, "/d/x"),
    ],
)
def test_the_folder_is_the_first_that_is_named(
    monkeypatch: pytest.MonkeyPatch, kernels: Path, variables: dict[str, str], folder: str
) -> None:
    for name in ("FP8MOE_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    set_variables(monkeypatch, **variables)
    assert cache.cache_dir() == Path(folder)


def test_a_folder_in_the_home_of_nobody_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, FP8MOE_CACHE_DIR="~nosuchuser/x")
    with pytest.raises(
        CacheError, match=r"the home folder is unknown, but needed for ~nosuchuser/x\. Set FP8MOE_CACHE_DIR to"
    ):
        cache.cache_dir()
