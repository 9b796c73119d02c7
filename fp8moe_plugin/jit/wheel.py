"""The kernels in a wheel: a bundle of all CUDA kernels for each major version of CUDA, which `make wheel` adds.

A checkout has none.
"""

import logging
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit.bundle import Bundle, read_bundle
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.quoting import shown_text

FOLDER = Path(__file__).parents[1]
CUDAS = 12, 13  # for which there are kernels: those of the last serve with newer ones, too
REMEDY = "install the wheel again"


def kernels_file() -> Path:
    """Returns where the wheel has the kernels for the CUDA of cuda-bindings, which in general is that of the driver.

    Drivers refuse kernels of a newer CUDA.
    """
    return _kernels_of(min(int(metadata.version("cuda-bindings").partition(".")[0]), CUDAS[-1]))


def _kernels_of(cuda: int) -> Path:
    return FOLDER / f"kernels-cuda{cuda}.tar"


def installed_kernels(target: str) -> Bundle | None:
    """Returns the kernels for a target that were installed with this package, or None without any.

    Raises:
        CacheError: they cannot be read, or there are only those of another CUDA.
    """
    if target != SM90 or not any(_kernels_of(cuda).exists() for cuda in CUDAS):
        return None
    path = kernels_file()
    if not path.exists():
        raise CacheError(f"{shown_text(path)}, for the installed cuda-bindings, is missing: {REMEDY}")
    return read_bundle(path, REMEDY)


def complete_kernels(keys: Collection[KernelKey]) -> Bundle | None:
    """Returns the wheel's kernels if they include all of these, which are for one target. Otherwise None.

    If some are missing, the reason is logged.
    """
    try:
        wheel = installed_kernels(next(iter(keys)).target) if keys else None
        if wheel:
            for key in keys:
                wheel.cubin(key)
    except (CacheError, Missing) as error:
        log_incomplete(error)
        return None
    return wheel


def log_incomplete(error: Exception) -> None:
    log_once(logging.WARNING, f"the wheel does not provide all kernels: {error}")
