"""An archive of compiled kernels for a container image, made by warmup and only read at serving.

    manifest.json                 what the kernels are, which compiler made them, the sha256 of each
    <source>-<digest>.cubin       ...

The same kernels make the same bytes. The manifest names the compiler, so that who reads a bundle needs none.
"""

import functools
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.jit.compiler import ARCH, entry_name, nvrtc_version
from fp8moe_plugin.jit.cubin import cubin_fault
from fp8moe_plugin.plan import KernelKey

MANIFEST = "manifest.json"
MAX_BYTES = 1 << 28  # a bundle of every kernel there is has about a megabyte


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


class Bundle:
    """A bundle in memory."""

    def __init__(self, path: Path, manifest: Manifest, cubins: dict[str, bytes]) -> None:
        self.path = path
        self.manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.kernels}
        self._cubins = cubins

    def cubin(self, key: KernelKey) -> bytes:
        """The cubin of a kernel. Raises `Missing` if it is not in the bundle, or damaged."""
        name = entry_name(key, self.manifest.compiler)
        entry, cubin = self._entries.get(name), self._cubins.get(name)
        if entry is None:
            raise Missing(
                f"{self.path} {'was made for other kernel sources' if self._holds_other(key) else 'does not hold it'}"
            )
        if cubin is None or hashlib.sha256(cubin).hexdigest() != entry.sha256:
            raise Missing(f"{self.path} is damaged: the checksum of {name} differs")
        fault = cubin_fault(cubin)
        if fault:
            raise Missing(f"{self.path} is damaged: {name} is {fault}")
        return cubin

    def _holds_other(self, key: KernelKey) -> bool:
        return any(entry.kernel == str(key) for entry in self._entries.values())


@functools.cache
def read_bundle(path: Path) -> Bundle:
    """A bundle, its members read but not judged yet.

    Raises:
        CacheError: there is no such file, or it is no bundle.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            members = {member.name: member for member in archive if member.isreg()}
            if sum(member.size for member in members.values()) > MAX_BYTES:
                raise CacheError(f"{path} is no bundle: it holds more than {MAX_BYTES >> 20} MiB")
            files = {name: _content(archive, member) for name, member in members.items()}
        manifest = Manifest.model_validate_json(files.pop(MANIFEST))
    except OSError as error:
        raise CacheError(f"the bundle {path} cannot be read: {error.strerror or error}") from error
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise CacheError(f"{path} is no bundle, or damaged: make it again with python -m warmup bundle") from error
    return Bundle(path, manifest, files)


def write_bundle(path: Path, kernels: dict[KernelKey, bytes]) -> Manifest:
    """Write a bundle of these cubins, which this machine's NVRTC has made. Raises `OSError`."""
    compiler = nvrtc_version()
    files = {entry_name(key, compiler): (key, cubin) for key, cubin in kernels.items()}
    entries = [
        Entry(name=name, kernel=str(key), sha256=hashlib.sha256(cubin).hexdigest(), bytes=len(cubin))
        for name, (key, cubin) in sorted(files.items())
    ]
    manifest = Manifest(arch=ARCH, compiler=compiler, kernels=entries)
    part = path.with_name(f"{path.name}.part")
    with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, MANIFEST, manifest.model_dump_json(indent=1).encode())
        for entry in entries:
            _add(archive, entry.name, files[entry.name][1])
    part.replace(path)
    return manifest


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # of nobody, at no time, so that the same content makes the same bytes
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""
