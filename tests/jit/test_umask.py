"""Under any umask, the owner can read and write what is created, and the umask still applies to others."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import bundle, cache
from fp8moe_plugin.jit.compiler import compile_kernel, entry_name, nvrtc_version
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables

KEY = KernelKey("tiny", (("VALUE", 3),))
UMASKS = [0o777, 0o700, 0o277, 0o077, 0o022]


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest, kernels: Path, tmp_path: Path) -> Iterator[int]:
    nvrtc_version()
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def assert_kept(folder: Path) -> None:
    """Check that a kernel compiled now is kept in the folder."""
    assert [find_or_compile(KEY).origin for _ in range(2)] == [Origin.COMPILER, Origin.CACHE]
    assert mode(folder) == 0o700
    assert mode(folder / entry_name(KEY, nvrtc_version())) == 0o600


def test_a_new_cache_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    folder = tmp_path / "new" / "parent" / "cache"
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=folder)
    assert_kept(folder)
    assert {mode(parent) for parent in (folder.parent, folder.parent.parent)} == {0o777 & ~umask | 0o700}


def test_an_existing_cache_is_usable(kernels: Path, umask: int) -> None:
    kernels.mkdir()
    kernels.chmod(0o700)
    assert_kept(kernels)


def test_a_bundle_is_readable_by_all(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "b.tar"
    bundle.write_bundle(path, {KEY: compile_kernel(KEY).cubin})
    assert mode(path) == 0o644
    assert bundle.read_bundle(path).cubin(KEY)


def test_a_parent_that_is_no_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    set_variables(monkeypatch, FP8MOE_CACHE_DIR=tmp_path / "link" / "parent" / "cache")
    with pytest.raises(CacheError, match=r"cache cannot be written: Not a directory\. Set FP8MOE_CACHE_DIR to"):
        cache.require_usable()
