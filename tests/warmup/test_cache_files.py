"""`cache`: what the cache is said to hold, and what is deleted from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.errors import CompileError
from warmup import cache_files
from warmup.__main__ import main

STALE = f"combine-{'a' * 64}"
OF_STALE = [f"{STALE}.{suffix}" for suffix in ("cubin", "cubin.lock", f"cubin.{'0' * 16}.part", "sass", "cu")]
FOLDER = f"combine-{'0' * 64}.cubin"  # which comes before the others
FOREIGN = ["notes.txt", f"{STALE}.cubin.bak", "combine-0.cubin", FOLDER]
STALE_TRITON = f"triton_gemm-{'b' * 64}.cubin"


@pytest.fixture
def used_cache(full_cache: Path) -> Path:
    """All kernels, the files of a kernel of another version, and files that are not the cache's."""
    for name in {*OF_STALE, *FOREIGN, STALE_TRITON} - {FOLDER}:
        (full_cache / name).write_bytes(b"x" * 1000)
    (full_cache / FOLDER).mkdir()
    return full_cache


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, dict[str, Any]]:
    assert main(["cache", *options, "--json", "-"]) == 0
    printed = capsys.readouterr()
    return printed.err, json.loads(printed.out)["cache"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_cache_is_shown_and_left_alone(used_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(used_cache)
    text, found = asked(capsys)
    assert names(used_cache) == before
    kernels = sum(name.endswith(".cubin") for name in before) - 2  # without foreign ones
    assert (found["kernels"], found["unused_kernels"], found["removed_kernels"]) == (kernels, 2, 0)
    assert f"{used_cache}: {kernels} kernels, " in text
    assert "2 are of other versions or compilers, and --prune deletes them" in text


def test_prune_leaves_what_this_version_uses(used_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(used_cache)
    text, found = asked(capsys, "--prune")
    assert names(used_cache) == before - {*OF_STALE, STALE_TRITON}
    assert (found["unused_kernels"], found["removed_kernels"], found["removed_bytes"]) == (0, 2, 6000)
    assert "after 2 kernels, 0.01 MB, were deleted" in text
    assert main(["verify"]) == 0


def test_clear_leaves_only_files_of_others(used_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = asked(capsys, "--clear")
    assert names(used_cache) == set(FOREIGN)
    assert (found["kernels"], found["bytes"]) == (0, 0)
    assert asked(capsys)[1]["kernels"] == 0


def test_without_a_compiler_its_kernels_count_as_used(
    used_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(target: str) -> str:
        raise CompileError(f"no compiler for {target}")

    monkeypatch.setattr(cache_files, "compiler_version", missing)
    before = names(used_cache)
    assert asked(capsys, "--prune")[1]["removed_kernels"] == 0
    assert names(used_cache) == before


def test_a_folder_that_does_not_exist_is_no_error(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ((), ("--prune",), ("--clear",)):
        text, found = asked(capsys, *options)
        assert text == f"{cache} does not exist yet; the first kernel that is compiled creates it\n"
        assert found["kernels"] == 0
    assert not cache.exists()


def test_a_folder_that_others_can_write_to_is_not_touched(used_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(used_cache)
    used_cache.chmod(0o777)
    assert main(["cache", "--clear"]) == 1
    assert "mode 0777 lets other users write to it" in capsys.readouterr().err
    assert names(used_cache) == before
