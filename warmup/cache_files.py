"""`cache`: shows the kernel cache, and deletes what this version does not use, or all of it."""

from collections.abc import Iterable
from pathlib import Path

from fp8moe_plugin.errors import CompileError
from fp8moe_plugin.jit import cache
from fp8moe_plugin.jit.compiler import compiler_version, entry_name
from fp8moe_plugin.launches.kernel_sets import all_kernels
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.triton.catalog import TARGETS
from fp8moe_plugin.quoting import shown_text
from warmup.options import Options
from warmup.report import CacheReport, Report

ENTRY, TRITON = ".cubin", "triton_"


def show_or_empty(options: Options, report: Report) -> bool:
    """Raises `CacheError` if the folder must not be used."""
    sizes = cache.stored()
    unused = {name: sizes[name] for name in _unused(sizes)}
    removed = sizes if options.clear else unused if options.prune else {}
    if removed:
        cache.remove(removed)
    left = {name: size for name, size in sizes.items() if name not in removed}
    report.cache = CacheReport(
        path=str(cache.cache_dir()),
        kernels=_kernels(left),
        bytes=sum(left.values()),
        unused_kernels=_kernels(unused.keys() & left.keys()),
        removed_kernels=_kernels(removed),
        removed_bytes=sum(removed.values()),
    )
    print(text(report.cache))
    return True


def text(found: CacheReport) -> str:
    if not Path(found.path).exists():
        return f"{shown_text(found.path)} does not exist yet; the first kernel that is compiled creates it"
    what = f"{shown_text(found.path)}: {found.kernels} kernels, {found.bytes / 1e6:.2f} MB"
    if found.removed_kernels or found.removed_bytes:
        return f"{what}, after {found.removed_kernels} kernels, {found.removed_bytes / 1e6:.2f} MB, were deleted"
    if found.unused_kernels:
        return f"{what}; {found.unused_kernels} are of other versions or compilers, and --prune deletes them"
    return what


def _unused(names: Iterable[str]) -> set[str]:
    """Returns the files of kernels that this version, with the compilers that are installed, does not look for.

    Without a compiler, its kernels count as used.
    """
    cuda, triton = _stems((SM90,)), _stems(TARGETS)
    found = set()
    for name in names:
        used, match = triton if name.startswith(TRITON) else cuda, cache.FILE.fullmatch(name)
        if used is not None and match and match[1] not in used:
            found.add(name)
    return found


def _stems(targets: Iterable[str]) -> set[str] | None:
    """Returns the names of the entries of all kernels, without suffixes, or None if they have no compiler here."""
    try:
        keys = [(key, compiler_version(target)) for target in targets for key in all_kernels(target)]
    except CompileError:
        return None
    return {entry_name(key, compiler).removesuffix(ENTRY) for key, compiler in keys}


def _kernels(names: Iterable[str]) -> int:
    return sum(name.endswith(ENTRY) for name in names)
