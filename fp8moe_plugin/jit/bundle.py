"""An archive of compiled kernels for a container image, written by warmup and only read when serving.

    manifest.json                 the kernels, their compiler, and the sha256 of each
    <source>-<digest>.cubin       one per kernel

Bundles are reproducible: the same kernels give the same bytes. The manifest names the compiler, so that reading a
bundle does not require one. A bundle is a tar archive of regular files only, so the memory needed to read it is bounded
by its size, independent of its headers.
"""

import contextlib
import functools
import hashlib
import io
import stat
import tarfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, field_validator

from fp8moe_plugin.checkpoint.untrusted import Limits, read_json, read_regular
from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit.atomic import write_file
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.jit.compiler import compiler_version, entry_name
from fp8moe_plugin.jit.cubin import cubin_fault
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.plan.triton.catalog import TARGETS
from fp8moe_plugin.quoting import shown, shown_text

MANIFEST = "manifest.json"
REMEDY = "create it again with fp8moe-warmup bundle"
ARCHS = (SM90, *TARGETS)
MAX_BYTES = 1 << 26  # about seven times a bundle of all existing kernels
MAX_KERNELS = 4096  # about thirty times the number of existing kernels
MANIFEST_LIMITS = Limits(size=512 * MAX_KERNELS, containers=MAX_KERNELS + 2, values=4 * MAX_KERNELS + 4)


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kernel: str
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    bytes: int


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    arch: str
    compiler: str
    kernels: list[Entry]

    @field_validator("kernels")
    @classmethod
    def _names_are_unique(cls, kernels: list[Entry]) -> list[Entry]:
        if len({entry.name for entry in kernels}) < len(kernels):
            raise ValueError("an entry is listed twice")
        return kernels


class Bundle:
    """A bundle that was read into memory."""

    def __init__(self, path: Path, manifest: Manifest, cubins: dict[str, bytes]) -> None:
        self._shown = shown_text(path)
        self.manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.kernels}
        self._cubins = cubins

    def cubin(self, key: KernelKey) -> bytes:
        """Returns the cubin of a kernel. Raises `Missing` if the bundle does not contain it or it is damaged."""
        if key.target != self.manifest.arch:
            raise Missing(f"{self._shown} contains kernels for {self.manifest.arch}, not for {key.target}: {REMEDY}")
        name = entry_name(key, self.manifest.compiler)
        entry = self._entries.get(name)
        if entry is None:
            raise Missing(
                f"{self._shown} "
                + ("was made from other kernel sources" if self._has_other_version(key) else "does not contain it")
            )
        return self._checked(entry)

    def check(self) -> None:
        """Raises `CacheError` if a cubin is damaged."""
        try:
            for entry in self.manifest.kernels:
                self._checked(entry)
        except Missing as damage:
            raise CacheError(f"{damage}: {REMEDY}") from damage

    def _checked(self, entry: Entry) -> bytes:
        cubin, damaged = self._cubins.get(entry.name), f"{self._shown} is damaged"
        if cubin is None or hashlib.sha256(cubin).hexdigest() != entry.sha256:
            raise Missing(f"{damaged}: the checksum of {entry.name} differs")
        if len(cubin) != entry.bytes:
            raise Missing(f"{damaged}: the size of {entry.name} differs")
        if fault := cubin_fault(cubin, self.manifest.arch):
            raise Missing(f"{damaged}: {entry.name} is {fault}")
        return cubin

    def _has_other_version(self, key: KernelKey) -> bool:
        return any(entry.kernel == str(key) for entry in self._entries.values())


def read_bundle(path: Path, remedy: str = REMEDY) -> Bundle:
    """Read a bundle; its cubins are checked when they are used. A process reads each path once, even if that fails.

    Args:
        remedy: what to do if it is damaged, for the message.
    Raises:
        CacheError: there is no such file, it is not a bundle, or it is one for other GPUs.
    """
    bundle = _read_once(path, remedy)
    if isinstance(bundle, str):
        raise CacheError(bundle)
    return bundle


@functools.cache
def _read_once(path: Path, remedy: str) -> Bundle | str:
    """Returns a bundle, or the reason why the file cannot be used."""
    try:
        content = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"the bundle {shown_text(path)} cannot be read: {reason}"
    try:
        files = _members(content)
        manifest = _manifest(files.pop(MANIFEST))
        if manifest.arch not in ARCHS:
            return f"{shown_text(path)} contains kernels for {shown(manifest.arch)}, which are not served: {remedy}"
        return Bundle(path, manifest, files)
    except CacheError as error:
        return str(error)
    except (tarfile.TarError, KeyError, ValueError):
        return f"{shown_text(path)} is not a bundle, or it is damaged: {remedy}"


def write_bundle(path: Path, kernels: dict[KernelKey, bytes], compiler: str | None = None) -> bytes:
    """Atomically write a bundle of cubins, all for one target and by one compiler. Returns its bytes.

    Args:
        compiler: the compiler that made them, by default this machine's.
    Raises:
        CacheError: the path exists and is not a regular file, or it cannot be written.
    """
    content = _archive(kernels, compiler)
    try:
        _require_replaceable(path)
        write_file(path, content, 0o644, least=0o644)  # another user may serve
    except OSError as error:
        raise CacheError(
            f"{shown_text(path)} cannot be written: {error.strerror}. "
            "Choose a file in a writable folder on a disk with free space."
        ) from error
    return content


def _members(archive: bytes) -> dict[str, bytes]:
    """Returns the files of an archive, by name.

    Parsed here because `tarfile` supports long names, pax records and sparse maps, whose cost has no bound.

    Raises:
        TarError, ValueError: the archive is damaged, or contains anything but regular files, too many, or duplicates.
    """
    files: dict[str, bytes] = {}
    at = 0
    while (block := archive[at : at + tarfile.BLOCKSIZE]) != bytes(tarfile.BLOCKSIZE):
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        at += tarfile.BLOCKSIZE
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not 0 <= member.size <= len(archive) - at:
            raise tarfile.ReadError(f"{shown(member.name)} is not a regular file, or it is truncated")
        if member.name in files or len(files) > MAX_KERNELS:
            raise tarfile.ReadError(f"{shown(member.name)} is a duplicate, or there are too many files")
        files[member.name] = archive[at : at + member.size]
        at += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return files


def _manifest(text: bytes) -> Manifest:
    """Parse the manifest. Raises `ValueError`. Its size is limited first: Pydantic needs 600 bytes for each `{}`."""
    content, _ = read_json(io.BytesIO(text), len(text), MANIFEST_LIMITS, "the manifest", plain=True)
    return Manifest.model_validate(content)


def _archive(kernels: dict[KernelKey, bytes], compiler: str | None) -> bytes:
    (target,) = {key.target for key in kernels} or {SM90}
    compiler = compiler or compiler_version(target)
    files = {entry_name(key, compiler): (key, cubin) for key, cubin in kernels.items()}
    entries = [
        Entry(name=name, kernel=str(key), sha256=hashlib.sha256(cubin).hexdigest(), bytes=len(cubin))
        for name, (key, cubin) in sorted(files.items())
    ]
    manifest = Manifest(arch=target, compiler=compiler, kernels=entries)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, MANIFEST, manifest.model_dump_json(indent=1).encode())
        for entry in entries:
            _add(archive, entry.name, files[entry.name][1])
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # without owner and time, so that bundles are reproducible
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _require_replaceable(path: Path) -> None:
    """Raise `CacheError` if the path exists and is a link, device, pipe or folder. May raise `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CacheError(
                f"{shown_text(path)} is not a regular file, so it is not replaced: choose another file, or remove it"
            )
