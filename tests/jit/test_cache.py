"""Compiled kernels on disk: whole or not there, never wrong."""

import logging
import os
import stat
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from fp8moe_plugin.errors import CompileError, UnsupportedError
from fp8moe_plugin.jit import cache, compiler
from fp8moe_plugin.plan import KernelKey
from fp8moe_plugin.settings import settings

KEY = KernelKey("tiny", (("VALUE", 3),))
SOURCE = 'extern "C" __global__ void tiny(int* out) { *out = VALUE; }'


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a csrc of one small kernel."""
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: {"tiny.cu": SOURCE}[name])
    yield tmp_path / "cache"
    settings.cache_clear()


def entry(folder: Path) -> Path:
    (path,) = folder.glob("*.cubin")
    return path


def test_the_second_load_is_a_hit_of_the_same_bytes(kernels: Path) -> None:
    first, second = cache.load_or_compile(KEY), cache.load_or_compile(KEY)
    assert (first[1], second[1]) == (False, True)
    assert first[0] == second[0]
    assert first[0].startswith(b"\x7fELF")


def test_a_hit_survives_an_unwritable_cache_and_writes_nothing(kernels: Path) -> None:
    cache.load_or_compile(KEY)
    before = [(p.name, p.stat().st_mtime_ns) for p in kernels.iterdir()]
    kernels.chmod(0o500)
    try:
        assert cache.load_or_compile(KEY)[1]
    finally:
        kernels.chmod(0o700)
    assert [(p.name, p.stat().st_mtime_ns) for p in kernels.iterdir()] == before


def test_a_cache_folder_in_the_home_of_nobody_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8MOE_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(UnsupportedError, match=r"FP8MOE_CACHE_DIR=~nosuchuser/x: no home folder.*without ~, or unset"):
        cache.load_or_compile(KEY)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_entry_is_compiled_again_and_healed(
    kernels: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cubin, _ = cache.load_or_compile(KEY)
    whole = entry(kernels).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    entry(kernels).write_bytes({"flip": bytes(flipped), "truncate": whole[:-1], "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, logger="fp8moe"):
        again, hit = cache.load_or_compile(KEY)
    assert not hit
    assert again == cubin
    assert "damaged" in caplog.text
    assert cache.load_or_compile(KEY)[1]


def test_a_folder_that_cannot_be_written_costs_a_warning_not_the_kernel(
    kernels: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    settings.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fp8moe"):
        cubin, hit = cache.load_or_compile(KEY)
    assert cubin
    assert not hit
    assert "not kept" in caplog.text


def test_a_failed_publish_leaves_no_file_behind(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not cache.load_or_compile(KEY)[1]
    assert list(kernels.iterdir()) == []


def test_entries_are_private(kernels: Path) -> None:
    cache.load_or_compile(KEY)
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(kernels).stat().st_mode) == 0o600


def test_the_digest_changes_with_all_that_the_compiler_reads(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {compiler.digest(KEY), compiler.digest(KernelKey("tiny", (("VALUE", 4),)))}
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: SOURCE + " ")
    digests.add(compiler.digest(KEY))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "nvrtc 99.0")
    digests.add(compiler.digest(KEY))
    assert len(digests) == 4


def test_an_error_in_a_source_names_the_file_and_the_line(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"tiny.cu": '#include "part.cuh"\n' + SOURCE, "part.cuh": "#pragma once\n\nint broken = ;"}
    monkeypatch.setattr(compiler, "_csrc_text", texts.__getitem__)
    with pytest.raises(CompileError, match=r"(?s)part\.cuh\(3\).*Upgrade the package nvidia-cuda-nvrtc.*report this"):
        cache.load_or_compile(KEY)


def test_a_broken_nvrtc_is_told(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (failure, None, None))
    compiler.nvrtc_version.cache_clear()
    with pytest.raises(CompileError, match=r"its version .*INTERNAL_ERROR.*Reinstall the package nvidia-cuda-nvrtc"):
        cache.load_or_compile(KEY)


def test_a_kernel_that_needs_local_memory_costs_a_warning(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = 'extern "C" __global__ void tiny(int* p) { int a[512]; for (int& x : a) x = *p++; *p = a[threadIdx.x]; }'
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: source)
    with caplog.at_level(logging.WARNING, logger="fp8moe"):
        assert cache.load_or_compile(KEY)[0]
    assert "2048 bytes stack frame" in caplog.text
