"""Archives of compiled kernels: the same bytes each time, and nothing wrong comes out of a damaged one."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import bundle, compiler
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.plan import KernelKey
from tests.jit.conftest import SOURCE, forget

KEYS = [KernelKey("tiny", (("VALUE", value),)) for value in (3, 4)]


@pytest.fixture
def cubins(kernels: Path) -> dict[KernelKey, bytes]:
    return {key: compile_kernel(key).cubin for key in KEYS}


@pytest.fixture
def path(cubins: dict[KernelKey, bytes], tmp_path: Path) -> Path:
    bundle.write_bundle(tmp_path / "out.tar", cubins)
    return tmp_path / "out.tar"


def rewrite(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Change or (None) leave out members of an archive."""
    with tarfile.open(path) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            new = change(name, content)
            if new is not None:
                member = tarfile.TarInfo(name)
                member.size = len(new)
                archive.addfile(member, io.BytesIO(new))
    forget()


def test_what_went_in_comes_out(path: Path, cubins: dict[KernelKey, bytes]) -> None:
    assert {key: bundle.read_bundle(path).cubin(key) for key in KEYS} == cubins


def test_the_same_kernels_make_the_same_bytes(path: Path, cubins: dict[KernelKey, bytes], tmp_path: Path) -> None:
    bundle.write_bundle(tmp_path / "again.tar", dict(reversed(cubins.items())))
    assert (tmp_path / "again.tar").read_bytes() == path.read_bytes()


def test_the_compiler_of_the_reading_machine_does_not_matter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "nvrtc_version", lambda: pytest.fail("asked for NVRTC"))
    assert bundle.read_bundle(path).cubin(KEYS[0])


def test_a_kernel_that_is_not_in_it_is_missing(path: Path) -> None:
    with pytest.raises(Missing, match=r"out\.tar does not hold it$"):
        bundle.read_bundle(path).cubin(KernelKey("tiny", (("VALUE", 5),)))


def test_a_bundle_of_other_sources_is_missing_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: SOURCE + " ")
    with pytest.raises(Missing, match=r"out\.tar was made for other kernel sources"):
        bundle.read_bundle(path).cubin(KEYS[0])


@pytest.mark.parametrize("damage", ["flip", "leave out", "exchange"])
def test_a_damaged_member_is_missing(path: Path, cubins: dict[KernelKey, bytes], damage: str) -> None:
    def change(name: str, content: bytes) -> bytes | None:
        if name == bundle.MANIFEST:
            return content
        if damage == "exchange":
            return next(cubin for cubin in cubins.values() if cubin != content)
        return None if damage == "leave out" else content[:-1] + bytes([content[-1] ^ 1])

    rewrite(path, change)
    with pytest.raises(Missing, match=r"out\.tar is damaged: the checksum of tiny-\w+\.cubin differs"):
        bundle.read_bundle(path).cubin(KEYS[0])


def test_a_member_that_is_no_cubin_is_missing_even_if_the_manifest_vouches_for_it(
    kernels: Path, tmp_path: Path
) -> None:
    bundle.write_bundle(tmp_path / "out.tar", {KEYS[0]: b"#!/bin/sh\n" + bytes(100)})
    with pytest.raises(Missing, match="is no 64-bit ELF file"):
        bundle.read_bundle(tmp_path / "out.tar").cubin(KEYS[0])


def newer(name: str, content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"format": 2}).encode() if name == bundle.MANIFEST else content


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"no archive"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: rewrite(path, lambda name, content: None if name == bundle.MANIFEST else content),
        lambda path: rewrite(path, lambda name, content: b"{" if name == bundle.MANIFEST else content),
        lambda path: rewrite(path, newer),
    ],
)
def test_what_is_no_bundle_is_refused(path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(path)
    with pytest.raises(CacheError, match=r"out\.tar is no bundle, or damaged: make it again with python -m warmup"):
        bundle.read_bundle(path)


def test_a_bundle_that_is_not_there_is_refused(kernels: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"the bundle .*/none\.tar cannot be read: No such file or directory"):
        bundle.read_bundle(tmp_path / "none.tar")


def test_a_huge_archive_is_refused_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BYTES", 1000)
    with pytest.raises(CacheError, match="is no bundle: it holds more than"):
        bundle.read_bundle(path)
