"""Anything but a regular file in the cache costs one compilation with a reason; never memory, time or descriptors."""

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import cache
from fp8moe_plugin.jit.compiler import compile_kernel, entry_name, nvrtc_version
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables

KEY = KernelKey("tiny", (("VALUE", 3),))
NAME = "tiny-0123.cubin"
NOWHERE = "it is a dangling symbolic link"


@pytest.fixture
def folder(kernels: Path) -> Path:
    """The cache, empty."""
    kernels.mkdir()
    kernels.chmod(0o700)
    return kernels


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(4 << 40)


def zeros(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        path.open("rb").close()
    except PermissionError:
        pytest.skip("only root can make a device that works")


def socket_at(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("s")
        Path("s").rename(path)
    finally:
        os.chdir(here)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "sparse": (sparse, r"/{} is damaged: it is larger than 16 MiB"),
    "device": (zeros, r"/{} is damaged: its checksum differs"),
    "pipe": (os.mkfifo, r"/{} is damaged: its checksum differs"),
    "socket": (socket_at, r"/{} cannot be read: No such device or address"),
    "folder": (Path.mkdir, r"/{} cannot be read: Is a directory"),
    "link": (lambda path: path.symlink_to("/dev/zero"), r"/{} cannot be read: Too many levels of symbolic links"),
    "closed": (lambda path: path.touch(0), r"/{} (cannot be read: Permission denied|is damaged: its checksum differs)"),
}


@pytest.mark.parametrize(("make", "reason"), ODD.values(), ids=ODD)
def test_an_odd_entry_is_told_and_costs_no_descriptor(folder: Path, make: Callable[[Path], None], reason: str) -> None:
    make(folder / NAME)
    before = open_files()
    for _ in range(3):
        with pytest.raises(cache.Missing, match=reason.format(NAME)):
            cache.read(NAME)
    assert open_files() == before


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "folder"])
def test_an_odd_entry_is_replaced(folder: Path, kind: str) -> None:
    ODD[kind][0](folder / entry_name(KEY, nvrtc_version()))
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.COMPILER, Origin.CACHE]


def test_a_folder_in_the_place_of_an_entry_is_told(folder: Path) -> None:
    (folder / NAME).mkdir()
    with pytest.raises(CacheError, match=rf"/{NAME} cannot be written: Is a directory\. Delete it\.$"):
        cache.publish(NAME, compile_kernel(KEY).cubin)
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_an_entry_of_the_largest_size_is_read(folder: Path) -> None:
    cubin = compile_kernel(KEY).cubin
    cache.publish(NAME, cubin + bytes(cache.MAX_BYTES - cache.CHECKSUM_BYTES - len(cubin)))
    assert len(cache.read(NAME)) == cache.MAX_BYTES - cache.CHECKSUM_BYTES


@pytest.mark.parametrize("target", ["nowhere", "cache"], ids=["nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_no_cache(kernels: Path, target: str) -> None:
    kernels.symlink_to(target)
    refusal = rf"^{kernels} is not used: {NOWHERE}\. Set FP8MOE_CACHE_DIR to a folder of your own"
    with pytest.raises(cache.Missing, match=refusal):
        cache.read(NAME)
    for use in (cache.require_usable, lambda: cache.publish(NAME, b"cubin")):
        with pytest.raises(CacheError, match=refusal):
            use()
    assert find_or_compile(KEY).origin == Origin.COMPILER
    assert kernels.is_symlink()


def test_a_link_to_a_folder_is_a_cache(kernels: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o700)
    kernels.symlink_to("elsewhere")
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.COMPILER, Origin.CACHE]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, socket_at, lambda path: path.symlink_to("of_another")])
def test_an_odd_lock_or_leftover_is_in_nobodys_way(folder: Path, make: Callable[[Path], None]) -> None:
    name = entry_name(KEY, nvrtc_version())
    for odd in (f"{name}.lock", f"{name}.0.part", f"{name}.1.part"):
        make(folder / odd)
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.COMPILER, Origin.CACHE]
    assert not (folder / "of_another").exists()


def test_leftovers_that_cannot_be_listed_are_in_nobodys_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "glob", fail)
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.COMPILER, Origin.CACHE]


def test_a_relative_folder_in_one_that_is_gone_is_told(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    set_variables(monkeypatch, FP8MOE_CACHE_DIR="relative")
    with pytest.raises(
        CacheError, match=r"relative cannot be resolved: No such file or directory\. Set FP8MOE_CACHE_DIR"
    ):
        cache.cache_dir()
    assert find_or_compile(KEY).origin == Origin.COMPILER
