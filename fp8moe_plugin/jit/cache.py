"""Compiled kernels on disk: is the cubin of this key there, and is it whole?

    <cache_dir>/<source>-<digest>.cubin     32 bytes of sha256, then the cubin

The digest names everything the compiler reads, and the compiler's version, major and minor. An entry appears whole, by
an atomic rename, or not at all; the checksum catches what happens to it later. Reading never writes. Whoever loses a
race to publish has lost nothing: it uses the bytes it compiled. Known gaps: processes that start at once on an empty
cache compile the same kernels, some tenths of a second each; a patch release of NVRTC keeps the entries of the last.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import platformdirs

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.jit.compiler import compile_kernel, digest, nvrtc_version
from fp8moe_plugin.plan import KernelKey
from fp8moe_plugin.settings import settings

logger = logging.getLogger("fp8moe")
CHECKSUM_BYTES = hashlib.sha256().digest_size


def cache_dir() -> Path:
    """The folder of the compiled kernels, which need not exist.

    Raises:
        UnsupportedError: `FP8MOE_CACHE_DIR` starts with `~` and there is no such home.
    """
    chosen = settings().cache_dir
    if chosen is None:
        return platformdirs.user_cache_path("fp8moe")
    try:
        return chosen.expanduser()
    except RuntimeError as error:
        raise UnsupportedError(
            f"FP8MOE_CACHE_DIR={chosen}: no home folder is known for this ~. Write the path without ~, or unset it."
        ) from error


def load_or_compile(key: KernelKey) -> tuple[bytes, bool]:
    """The cubin of a kernel, and whether it came from the cache.

    Raises:
        CompileError: it was not there and does not compile.
        UnsupportedError: `FP8MOE_CACHE_DIR` names no folder.
    """
    path = cache_dir() / f"{key.source}-{digest(key)}.cubin"
    cubin = read(path)
    if cubin is not None:
        return cubin, True
    cubin, faults = compile_kernel(key)
    if faults:
        logger.warning(
            "fp8moe: %s may be slow, %s compiled it with: %s", key.source, nvrtc_version(), "; ".join(faults)
        )
    try:
        publish(path, cubin)
    except OSError as error:
        logger.warning("fp8moe: %s compiled but not kept in %s: %s", key.source, path.parent, error)
    return cubin, False


def read(path: Path) -> bytes | None:
    """The cubin at `path`, or None if there is none, or (with a warning) if it is damaged or cannot be read."""
    try:
        entry = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("fp8moe: cannot read %s, compiling instead: %s", path, error)
        return None
    checksum, cubin = entry[:CHECKSUM_BYTES], entry[CHECKSUM_BYTES:]
    if hashlib.sha256(cubin).digest() != checksum:
        logger.warning("fp8moe: %s is damaged (its checksum differs), compiling instead", path)
        return None
    return cubin


def publish(path: Path, cubin: bytes) -> None:
    """Put a cubin at `path`, whole or not at all, over whatever is there. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, staging = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
            file.flush()
            os.fsync(file.fileno())
        Path(staging).replace(path)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise
