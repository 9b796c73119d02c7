"""Reading any file as a bundle takes little time and memory, and happens only once."""

import io
import multiprocessing
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import bundle
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.conftest import set_variables

FORK = multiprocessing.get_context("fork")
KEYS = [KernelKey("tiny", (("VALUE", value),)) for value in range(5)]
MIB = 1 << 20
SMALL = 48 * MIB  # memory beyond a bundle's own bytes, which are held twice: in the archive and by member
HEAD, TAIL = b'{"format":1,"arch":"sm_90a","compiler":"nvrtc 13.0.88","kernels":[', b"]}"


def archive(**members: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, text in members.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return content.getvalue()


def empty(number: int) -> bytes:
    return tarfile.TarInfo(str(number)).tobuf(tarfile.USTAR_FORMAT)


def of_manifest(text: bytes) -> bytes:
    return archive(manifest_json=text)


def entries(count: int) -> bytes:
    one = b'{"name":"%d","kernel":"k","sha256":"' + b"0" * 64 + b'","bytes":1}'
    return of_manifest(HEAD + b",".join(one % number for number in range(count)) + TAIL)


CRAFTED: dict[str, Callable[[], bytes]] = {
    "a million empty kernels": lambda: of_manifest(HEAD + b"{}," * 1_000_000 + b"{}" + TAIL),
    "62 MiB of empty kernels": lambda: of_manifest(HEAD + b"{}," * (62 * MIB // 3) + b"{}" + TAIL),
    "62 MiB of lists": lambda: of_manifest(b'{"format":[' + b"[]," * (62 * MIB // 3) + b"[]]}"),
    "62 MiB of numbers": lambda: of_manifest(HEAD + b"1," * (31 * MIB) + b"1" + TAIL),
    "62 MiB of lists in lists": lambda: of_manifest(b"[" * (62 * MIB)),
    "one name of 62 MiB": lambda: of_manifest(HEAD + b'"' + b"x" * (62 * MIB) + b'"' + TAIL),
    "62 MiB of spaces": lambda: of_manifest(HEAD + b" " * (62 * MIB) + TAIL),
    "more kernels than any plan has": lambda: entries(5000),
    "thousands of members": lambda: b"".join(map(empty, range(5000))) + of_manifest(HEAD + TAIL),
    "one member over and over": lambda: empty(0) * (62 * MIB // tarfile.BLOCKSIZE) + of_manifest(HEAD + TAIL),
    "two manifests": lambda: of_manifest(HEAD + TAIL)[: 2 * tarfile.BLOCKSIZE] + of_manifest(HEAD + TAIL),
}


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def refuse_within(path: Path, memory: int, cpu_seconds: int) -> None:
    """Ends with status 0 if the bundle is refused as such."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + memory,) * 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end))
    with pytest.raises(
        CacheError, match=r"b\.tar is not a bundle, or it is damaged: create it again with fp8moe-warmup"
    ):
        bundle.read_bundle(path)


@pytest.mark.parametrize("crafted", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_bundle_is_refused_in_little_memory_and_time(tmp_path: Path, crafted: Callable[[], bytes]) -> None:
    content = crafted()
    (tmp_path / "b.tar").write_bytes(content)
    reader = FORK.Process(target=refuse_within, args=(tmp_path / "b.tar", 2 * len(content) + SMALL, 20))
    reader.start()
    reader.join(60)
    reader.kill()
    reader.join()
    assert reader.exitcode == 0


def test_a_bundle_may_hold_many_more_kernels_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_bytes(entries(4000))
    assert len(bundle.read_bundle(tmp_path / "b.tar").manifest.kernels) == 4000


@pytest.mark.parametrize("broken", [b"no archive", None], ids=["damaged", "not there"])
def test_a_bundle_that_cannot_be_used_is_read_once_and_costs_one_line(
    kernels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: bytes | None,
) -> None:
    path, reads, content = tmp_path / "b.tar", [], bundle.read_regular
    if broken:
        path.write_bytes(broken)
    monkeypatch.setattr(bundle, "read_regular", lambda path, most: reads.append(path) or content(path, most))
    set_variables(monkeypatch, FP8MOE_BUNDLE=path)
    assert {find_or_compile(key).origin for key in KEYS} == {Origin.COMPILER}
    for _ in range(3):
        with pytest.raises(CacheError, match=r"b\.tar (is not a bundle|cannot be read)"):
            bundle.read_bundle(path)
    assert reads == [path]
    assert caplog.text.count("the bundle does not provide all kernels") == 1


def test_a_bundle_that_is_made_again_is_read_by_the_next_process(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.tar"
    set_variables(monkeypatch, FP8MOE_BUNDLE=path)
    assert find_or_compile(KEYS[0]).origin == Origin.COMPILER
    bundle.write_bundle(path, {KEYS[0]: compile_kernel(KEYS[0]).cubin})
    set_variables(monkeypatch)
    assert find_or_compile(KEYS[0]).origin == Origin.BUNDLE
