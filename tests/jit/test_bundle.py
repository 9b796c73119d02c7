"""Bundles of compiled kernels: reproducible bytes, and no wrong kernel from a damaged one."""

import errno
import io
import json
import os
import random
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import bundle, compiler
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import SOURCE, forget

HEADER, CHECKSUM = tarfile.BLOCKSIZE, slice(148, 156)
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
    monkeypatch.setattr(bundle, "compiler_version", lambda target: pytest.fail("asked for NVRTC"))
    assert bundle.read_bundle(path).cubin(KEYS[0])


def test_a_kernel_that_is_not_in_it_is_missing(path: Path) -> None:
    with pytest.raises(Missing, match=r"out\.tar does not contain it$"):
        bundle.read_bundle(path).cubin(KernelKey("tiny", (("VALUE", 5),)))


def test_a_bundle_of_other_sources_is_missing_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_csrc_text", lambda name: SOURCE + " ")
    with pytest.raises(Missing, match=r"out\.tar was made from other kernel sources"):
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


def test_member_that_is_no_cubin_is_missing(kernels: Path, tmp_path: Path) -> None:
    bundle.write_bundle(tmp_path / "out.tar", {KEYS[0]: b"#!/bin/sh\n" + bytes(100)})
    with pytest.raises(Missing, match="is not a 64-bit ELF file"):
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
    with pytest.raises(
        CacheError, match=r"out\.tar is not a bundle, or it is damaged: create it again with fp8moe-warmup"
    ):
        bundle.read_bundle(path)


def test_a_bundle_that_is_not_there_is_refused(kernels: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"the bundle .*/none\.tar cannot be read: No such file or directory"):
        bundle.read_bundle(tmp_path / "none.tar")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.usefixtures("promptly")
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "b.tar")
    with pytest.raises(CacheError, match=r"the bundle .*/b\.tar cannot be read: it is not a regular file"):
        bundle.read_bundle(tmp_path / "b.tar")


def test_a_huge_archive_is_refused_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BYTES", 1000)
    with pytest.raises(CacheError, match="cannot be read: it is larger than"):
        bundle.read_bundle(path)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, socket_at, lambda path: path.symlink_to("of_another")])
@pytest.mark.parametrize("linked", [True, False])
def test_only_a_file_is_replaced(
    cubins: dict[KernelKey, bytes], tmp_path: Path, make: Callable[[Path], None], linked: bool
) -> None:
    if linked:
        (tmp_path / "of_another").write_bytes(b"theirs")
    make(tmp_path / "b.tar")
    before = (tmp_path / "b.tar").lstat()
    with pytest.raises(CacheError, match=r"b\.tar is not a regular file, so it is not replaced: choose another file"):
        bundle.write_bundle(tmp_path / "b.tar", cubins)
    assert os.path.samestat((tmp_path / "b.tar").lstat(), before)
    assert not linked or (tmp_path / "of_another").read_bytes() == b"theirs"
    assert not list(tmp_path.glob("*.part"))


def test_a_link_where_the_archive_is_staged_is_not_followed(cubins: dict[KernelKey, bytes], tmp_path: Path) -> None:
    (tmp_path / "of_another").write_bytes(b"theirs")
    (tmp_path / "b.tar.part").symlink_to("of_another")
    assert bundle.write_bundle(tmp_path / "b.tar", cubins) == (tmp_path / "b.tar").read_bytes()
    assert (tmp_path / "of_another").read_bytes() == b"theirs"


def test_who_writes_the_same_path_meanwhile_does_not_matter(
    path: Path, cubins: dict[KernelKey, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {KEYS[0]: cubins[KEYS[0]]}
    seen: list[bytes] = []

    def write_too(_: int) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        seen.extend([bundle.write_bundle(path, other), path.read_bytes()])

    monkeypatch.setattr(os, "fsync", write_too)
    last = bundle.write_bundle(path, cubins)
    assert seen[0] == seen[1] != last == path.read_bytes()


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_disk_that_is_full_leaves_the_old_bundle_and_nothing_else(
    path: Path, cubins: dict[KernelKey, bytes], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before, listing = path.read_bytes(), sorted(path.parent.iterdir())
    monkeypatch.setattr(os, "fsync" if step == "fsync" else "replace", full)
    with pytest.raises(CacheError, match=r"out\.tar cannot be written: No space left on device\. Choose a file in"):
        bundle.write_bundle(path, {KEYS[0]: cubins[KEYS[0]]})
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == (before, listing)


def test_a_folder_that_is_not_there_is_told(cubins: dict[KernelKey, bytes], tmp_path: Path) -> None:
    with pytest.raises(
        CacheError, match=r"none/b\.tar cannot be written: No such file or directory\. Choose a file in"
    ):
        bundle.write_bundle(tmp_path / "none" / "b.tar", cubins)


def sealed(header: bytes) -> bytes:
    """Returns a header with a valid checksum and any content."""
    blank = header[: CHECKSUM.start] + b" " * 8 + header[CHECKSUM.stop :]
    return blank[: CHECKSUM.start] + b"%06o\0 " % sum(blank) + blank[CHECKSUM.stop :]


def number(value: int) -> bytes:
    """Returns a size in base-256 encoding, which can exceed any file and can be negative."""
    return (b"\xff" if value < 0 else b"\x80") + (value % (1 << 88)).to_bytes(11, "big")


def header(kind: bytes, size: int, name: bytes = b"x") -> bytes:
    plain = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
    return sealed(name.ljust(100, b"\0") + plain[100:124] + number(size) + plain[136:156] + kind + plain[157:])


def pax(record: bytes) -> bytes:
    return header(tarfile.XHDTYPE, len(record)) + record.ljust(-(-len(record) // HEADER) * HEADER, b"\0")


CRAFTED = {
    "a longer name than memory": header(tarfile.GNUTYPE_LONGNAME, 1 << 45),
    "a longer name than addresses": header(tarfile.GNUTYPE_LONGNAME, 1 << 80),
    "more pax records than memory": header(tarfile.XHDTYPE, 1 << 45),
    "more pax records than addresses": header(tarfile.XGLTYPE, 1 << 80),
    "a pax record about all names": pax(b"16 path=renamed\n"),
    "pax records without end": header(tarfile.XHDTYPE, 0) * 5000,
    "a pax record of many digits": pax(b"1" * 200_000),
    "a sparse file": header(tarfile.GNUTYPE_SPARSE, 0),
    "a member that is the next one too": header(tarfile.REGTYPE, 0) + header(tarfile.REGTYPE, -HEADER),
    "a member of more than there is": header(tarfile.REGTYPE, 1 << 40),
    "a link": header(tarfile.SYMTYPE, 0),
    "a folder": header(tarfile.DIRTYPE, 0),
    "a device": header(tarfile.CHRTYPE, 0),
}


@pytest.mark.parametrize("crafted", CRAFTED.values(), ids=CRAFTED)
@pytest.mark.usefixtures("promptly")
def test_an_archive_of_anything_but_files_is_refused(path: Path, crafted: bytes) -> None:
    path.write_bytes(crafted + path.read_bytes())
    with pytest.raises(CacheError, match=r"out\.tar is not a bundle, or it is damaged"):
        bundle.read_bundle(path)


def mutated(archive: bytes, starts: list[int], draw: random.Random) -> bytes:
    """Returns an archive with a changed field of a header, or an inserted header, with valid checksums."""
    start = draw.choice(starts)
    old = archive[start : start + HEADER]
    value = number(draw.choice([-1, 1]) * draw.getrandbits(draw.randrange(1, 88)))
    kind = draw.choice([b"0", b"\0", b"1", b"2", b"5", b"7", b"L", b"K", b"S", b"x", b"g", b"X", draw.randbytes(1)])
    match draw.choice(["size", "octal", "kind", "name", "bytes", "insert"]):
        case "size":
            new = old[:124] + value + old[136:]
        case "octal":
            new = old[:124] + b"%011o\0" % draw.getrandbits(draw.randrange(1, 33)) + old[136:]
        case "kind":
            new = old[:156] + kind + old[157:]
        case "name":
            new = draw.randbytes(draw.randrange(1, 100)).ljust(100, b"\0") + old[100:]
        case "bytes":
            at = draw.randrange(HEADER - 8)
            new = old[:at] + draw.randbytes(8) + old[at + 8 :]
        case _:
            new = header(kind, draw.getrandbits(draw.randrange(1, 88))) + draw.choice([b"", pax(b"9 size=-9")]) + old
            return archive[:start] + new + archive[start + HEADER :]
    return archive[:start] + sealed(new) + archive[start + HEADER :]


@pytest.mark.usefixtures("promptly")
def test_whatever_a_header_says_no_wrong_bytes_come_out(path: Path, cubins: dict[KernelKey, bytes]) -> None:
    draw, whole = random.Random(0), path.read_bytes()
    with tarfile.open(path) as archive:
        starts = [member.offset for member in archive]
    served = refused = 0
    for _ in range(3000):
        path.write_bytes(mutated(whole, starts, draw))
        bundle._read_once.cache_clear()
        try:
            assert {key: bundle.read_bundle(path).cubin(key) for key in KEYS} == cubins
            served += 1
        except (CacheError, Missing):
            refused += 1
    assert served > 300
    assert refused > 300
