"""The compilers of the kernels in the cache, read from the cubins: file names contain only a hash of them."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fp8moe_plugin.errors import CacheError, CompileError
from fp8moe_plugin.jit.cache import CHECKSUM_BYTES, MAX_BYTES, cache_dir
from fp8moe_plugin.jit.compiler import nvrtc_release, nvrtc_version
from fp8moe_plugin.jit.cubin import CUDA_12_ABI, ELF

NOTE = re.compile(rb"Cuda compilation tools, release \d{1,3}\.\d{1,3}, V(\d{1,3}\.\d{1,3}\.\d{1,4})")
CUDA_12 = "nvrtc 12"  # whose cubins have no such note
UNKNOWN = "unknown"


def compiler_of_cubin(cubin: bytes) -> str:
    """Returns the compiler of a cubin like `nvrtc_version`, or `UNKNOWN`. Cubins of CUDA 12 have no minor version."""
    note = NOTE.search(cubin)
    if note:
        return f"nvrtc {note[1].decode()}"
    return CUDA_12 if cubin.startswith(ELF) and cubin[7] == CUDA_12_ABI else UNKNOWN


def cuda_of_cubin(cubin: bytes) -> int | None:
    """Returns the major CUDA version of the assembler that made a cubin, NVRTC's or Triton's, if it is known."""
    found = re.match(r"nvrtc (\d+)", compiler_of_cubin(cubin))
    return int(found[1]) if found else None


def cache_compilers(folder: Path) -> dict[str, int]:
    """Returns how many CUDA kernels of a cache folder each compiler made. Entries that cannot be read are skipped.

    Raises:
        OSError: the folder cannot be listed.
    """
    return dict(sorted(Counter(filter(None, map(_compiler_of, _cuda_kernels(folder)))).items()))


def _cuda_kernels(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*.cubin") if not path.name.startswith("triton_"))


def other_compilers() -> dict[str, int]:
    """Returns how many kernels in the cache each other compiler made; empty if this process has no compiler."""
    try:
        own, (major, _) = nvrtc_version(), nvrtc_release()
        made = cache_compilers(cache_dir())
    except (CompileError, CacheError, OSError):  # reported when a compiler or the cache is needed
        return {}
    ours = {UNKNOWN} | ({CUDA_12} if major == 12 else set())
    # Only the version of NVRTC's own package has a patch level; otherwise `own` is the release.
    return {name: count for name, count in made.items() if name not in ours and not f"{name}.".startswith(f"{own}.")}


def listed(compilers: dict[str, int]) -> str:
    return ", ".join(f"{count} by {name}" for name, count in compilers.items())


def _compiler_of(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            return compiler_of_cubin(file.read(size)[CHECKSUM_BYTES:]) if size <= MAX_BYTES else None
    except OSError:
        return None
