"""Lookup of a kernel's cubin in the bundle, the cache and the wheel; a kernel that is in none of them is compiled."""

import contextlib
import logging
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from fp8moe_plugin.errors import CacheError, CompileError, KernelNotPrecompiled
from fp8moe_plugin.jit import cache, wheel
from fp8moe_plugin.jit.bundle import read_bundle
from fp8moe_plugin.jit.compiler import compile_kernel, compiler_version, entry_name
from fp8moe_plugin.jit.dump import dump
from fp8moe_plugin.jit.toolchain import listed, other_compilers
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.quoting import shell_word, shown_text
from fp8moe_plugin.settings import settings

logger = logging.getLogger("fp8moe")
WARMUP = "fp8moe-warmup"  # without further options, it compiles every kernel
BUNDLE = "fp8moe-kernels.tar"
OTHER_CACHE = "FP8MOE_CACHE_DIR=$(mktemp -d)"  # of mode 0700

compile_times: list[float] = []  # seconds for each kernel that this process has compiled


class Origin(StrEnum):
    BUNDLE = "bundle"
    CACHE = "cache"
    WHEEL = "wheel"
    COMPILER = "compiler"


class Found(NamedTuple):
    cubin: bytes
    origin: Origin


class Made(NamedTuple):
    """The result of `compile_into_cache`."""

    cubin: bytes
    compiled: bool  # false if another process added it to the cache in the meantime
    faults: list[str]  # of the compiled code, see `Compiled`
    not_kept: str | None  # why it is not in the cache


def find_or_compile(key: KernelKey, warmup: str = WARMUP) -> Found:
    """Returns the cubin of a kernel, for serving.

    Args:
        warmup: the command that precompiles it, for messages.
    Raises:
        CompileError: it was not found, and does not compile.
        KernelNotPrecompiled: it was not found, and `FP8MOE_JIT=forbid` is set.
    """
    try:
        return find(key)
    except cache.Missing as missing:
        why = str(missing)
        if isinstance(missing, cache.Damaged):
            logger.warning("fp8moe: %s", why)
    # This reads the whole cache, so it runs only before the first compilation.
    others = {} if compile_times or key.target != SM90 else other_compilers()
    if others:
        own = compiler_version(key.target)
        made_by = f"the cache has kernels that other compilers made ({listed(others)}); this one is {own}"
        why = f"{why}; {made_by}"
    jit, (command, serve) = settings().jit, remedy(warmup + gpu_option(key.target), bundle_path())
    if jit == "forbid":
        raise KernelNotPrecompiled(
            f"The kernel {key} is not precompiled ({why}), and FP8MOE_JIT=forbid is set. Run `{command}`"
            f"{serve or ' as this user and with the same FP8MOE_* variables'}, or set FP8MOE_JIT=allow to compile "
            "kernels at startup."
        )
    if jit == "warn":
        log_once(
            logging.WARNING, f"kernels are compiled at startup; to compile them in advance, run `{command}`{serve}"
        )
    if others:
        log_once(logging.WARNING, f"{made_by}, so kernels are compiled again")
    made = compile_into_cache(key)
    if made.compiled:
        logger.log(logging.WARNING if jit == "warn" else logging.INFO, "fp8moe: compiled %s (%s)", key, why)
    if made.faults:
        logger.warning(
            "fp8moe: %s may be slow, as %s reported: %s", key, compiler_version(key.target), "; ".join(made.faults)
        )
    if made.not_kept:
        log_once(logging.WARNING, f"compiled kernels are used by this process, but not cached: {made.not_kept}")
    return Found(made.cubin, Origin.COMPILER if made.compiled else Origin.CACHE)


def find(key: KernelKey) -> Found:
    """Returns the cubin of a kernel from the bundle, the cache or the wheel.

    Raises:
        Missing: it is in none of them; the message gives the reason for each.
    """
    bundle, reasons = bundle_path(), []
    if bundle:
        try:
            return Found(read_bundle(bundle).cubin(key), Origin.BUNDLE)
        except (CacheError, cache.Missing) as error:
            reasons.append(str(error))
            log_once(logging.WARNING, f"the bundle does not provide all kernels: {error}")
    try:
        return Found(cache.read(entry_name(key, compiler_version(key.target)), key.target), Origin.CACHE)
    except CompileError as error:  # names in the cache include the compiler's version
        missing = cache.Missing(f"the cache cannot be searched: {error}")
    except cache.Missing as error:
        missing = error
    reasons.append(str(missing))
    try:
        if installed := wheel.installed_kernels(key.target):
            cubin = installed.cubin(key)
            if isinstance(missing, cache.Damaged):
                log_once(logging.WARNING, f"{missing}; the wheel's kernel is used")
            return Found(cubin, Origin.WHEEL)
    except (CacheError, cache.Missing) as error:
        reasons.append(str(error))
        wheel.log_incomplete(error)
    raise type(missing)("; ".join(reasons)) from missing


def compile_into_cache(key: KernelKey) -> Made:
    """Compile a kernel and add it to the cache. If another process is compiling it, wait and use its result.

    Raises:
        CompileError: the kernel does not compile.
    """
    name = entry_name(key, compiler_version(key.target))
    with cache.locked(name):
        try:
            return Made(cache.read(name, key.target), False, [], None)
        except cache.Missing:
            start = time.perf_counter()
            compiled = compile_kernel(key)
            cubin, faults = compiled.cubin, compiled.faults
            compile_times.append(time.perf_counter() - start)
        try:
            cache.publish(name, cubin)
            not_kept = None
            if settings().jit_debug:
                dump(key, name, compiled)
        except CacheError as error:
            not_kept = str(error)
        return Made(cubin, True, faults, not_kept)


def place(origin: Origin) -> str:
    """Returns the path where kernels of this origin are stored, to be appended to a message after its name."""
    match origin:
        case Origin.BUNDLE:
            return f" {shown_text(bundle_path())}"
        case Origin.CACHE:
            return f" {shown_text(cache.cache_dir())}"
        case Origin.WHEEL:
            return f" {shown_text(wheel.kernels_file())}"
        case Origin.COMPILER:
            return ""


def compiler_of(origin: Origin, target: str) -> str:
    """Returns the compiler of the kernels of this origin, see `compiler_version`."""
    bundle = bundle_path()
    if origin == Origin.WHEEL and (installed := wheel.installed_kernels(target)):
        return installed.manifest.compiler
    return read_bundle(bundle).manifest.compiler if bundle and origin == Origin.BUNDLE else compiler_version(target)


def bundle_path() -> Path | None:
    bundle = settings().bundle
    return Path(os.path.expanduser(bundle)) if bundle else None  # noqa: PTH111  (Path.expanduser raises without a home)


def gpu_option(target: str) -> str:
    """Returns the warm-up's option for a target, to be appended to its command."""
    return f" --gpu {target.replace('_', '')}" if target != SM90 else ""


class Remedy(NamedTuple):
    command: str  # makes missing kernels available
    serve: str  # how to serve with them, to be appended to "Run `command`"


def remedy(warmup: str, bundle: Path | None) -> Remedy:
    """Returns how to make missing kernels available.

    The command is `warmup`, or one that writes the bundle if a bundle is in use. If the cache cannot be used, the
    command uses another cache, and serving needs a bundle.
    """
    lacking, serve = cache.why_not_usable(), ""
    if lacking and not bundle:
        bundle = _new_bundle()
        serve = f", and serve with FP8MOE_BUNDLE={shell_word(str(bundle))}"
    if bundle:
        warmup = f"{warmup.replace(WARMUP, f'{WARMUP} bundle', 1)} --bundle {shell_word(str(bundle))}"
    return Remedy(f"{OTHER_CACHE} {warmup}" if lacking else warmup, serve)


def _new_bundle() -> Path:
    """Returns a path for a bundle: in the cache's folder if it is writable, such as a volume's, else in this folder."""
    with contextlib.suppress(CacheError):
        folder = cache.cache_dir()
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder / BUNDLE
    return Path(BUNDLE)
