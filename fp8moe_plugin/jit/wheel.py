"""The kernels in a wheel: a bundle of all CUDA kernels, which `make wheel` adds. A checkout does not have it."""

import logging
import re
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit.bundle import Bundle, read_bundle
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.keys import SM90, KernelKey

KERNELS = Path(__file__).parents[1] / "kernels.tar"
REMEDY = "install the wheel again"


def installed_kernels(target: str) -> Bundle | None:
    """Returns the kernels that were installed with this package, or None if there are none for a target.

    Raises:
        CacheError: they cannot be read, or cuda-bindings are of an older CUDA, and so is the driver in general.
    """
    if target != SM90 or not KERNELS.exists():
        return None
    kernels = read_bundle(KERNELS, REMEDY)
    bindings, compiler = metadata.version("cuda-bindings"), kernels.manifest.compiler
    compiled = re.match(r"nvrtc (\d{1,3})\.", compiler)
    if compiled and int(compiled[1]) > int(bindings.partition(".")[0]):
        raise CacheError(f"the wheel's kernels, by {compiler}, are not used with cuda-bindings {bindings}")
    return kernels


def complete_kernels(keys: Collection[KernelKey]) -> Bundle | None:
    """Returns the wheel's kernels, or None if there are none or some of these, all for one target, are not among them.

    The reason is logged.
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
