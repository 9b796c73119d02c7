"""`doctor`: which kernels this machine has and where, what is installed, and what serving would refuse."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from fp8moe_plugin.checkpoint.shapes import rank_shapes
from fp8moe_plugin.checkpoint.untrusted import shown_text
from fp8moe_plugin.errors import CacheError, Fp8MoeError
from fp8moe_plugin.jit import cache, sequence
from fp8moe_plugin.jit.bundle import read_bundle
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.jit.lookup import bundle_path
from fp8moe_plugin.plan import HOPPER
from fp8moe_plugin.settings import Settings, settings, variable
from warmup import engines, kernels
from warmup.model import read_checkpoint
from warmup.options import Options
from warmup.report import Finding, Report, State


def findings(options: Options, report: Report) -> list[Finding]:
    """Run all checks. A failed check is a finding, not an error."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    found = [Finding(subject="versions", found=versions), *_look("settings", _settings)]
    if found[-1].ok is False:  # all other checks need the settings
        return found
    looks = {
        "engines": engines.findings,
        "compiler": _compiler,
        "launcher": _launcher,
        "cache": _cache,
        "bundle": _bundle,
        "GPU": _gpu,
    }
    for subject, look in looks.items():
        found += _look(subject, look)
    plan: kernels.Plan = {}
    found += _look("model", lambda: _model(options, report, plan))
    found += _look("kernels", lambda: _kernels(report, plan or kernels.plan_of(None)))
    if report.kernels and all(kernel.state == State.PRESENT for kernel in report.kernels):
        return [_not_needed(finding) if finding.subject in ("compiler", "cache") else finding for finding in found]
    return found


def _look(subject: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(look())
    except Fp8MoeError as error:
        return [Finding(subject=subject, found=str(error), ok=False)]


def _not_needed(finding: Finding) -> Finding:
    if finding.ok:
        return finding
    return Finding(subject=finding.subject, found=f"not needed, because all kernels are available; {finding.found}")


def text(found: list[Finding]) -> str:
    marks = {True: "ok", False: "WRONG", None: ""}
    return "\n".join(f"{marks[finding.ok]:5s}  {finding.subject}: {finding.found}" for finding in found)


def _settings() -> Iterator[Finding]:
    chosen = settings()
    given = [f"{variable(field)}={shown_text(getattr(chosen, field))}" for field in Settings.model_fields]
    names = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")
    folders = [f"{name}={shown_text(os.environ.get(name))}" for name in names]
    yield Finding(subject="settings", found=", ".join([*given, *folders]), ok=True)


def _compiler() -> Iterator[Finding]:
    yield Finding(subject="compiler", found=nvrtc_version(), ok=True)


def _launcher() -> Iterator[Finding]:
    try:
        sequence.extension()
    except ImportError as error:
        yield Finding(subject="launcher", found=f"cuda-bindings: {sequence.WITHOUT_EXTENSION} ({shown_text(error)})")
    else:
        yield Finding(subject="launcher", found="C extension", ok=True)


def _cache() -> Iterator[Finding]:
    folder = cache.cache_dir()
    shown = shown_text(folder)
    try:
        if cache.is_dangling_link(folder):
            yield Finding(subject="cache", found=f"{shown}: {cache.DANGLING_LINK}. {cache.ADVICE}", ok=False)
            return
        status = folder.stat()
        entries = [entry.lstat().st_size for entry in folder.glob("*.cubin")]
    except FileNotFoundError:
        yield _no_cache(folder)
        return
    except OSError as error:
        yield Finding(subject="cache", found=f"{shown}: {error.strerror}. {cache.ADVICE}", ok=False)
        return
    refusal = cache.folder_refusal(status) if stat.S_ISDIR(status.st_mode) else "it is not a folder"
    if not refusal and not os.access(folder, os.R_OK | os.X_OK):
        refusal = "it cannot be read"
    found = f"{shown}, mode {stat.S_IMODE(status.st_mode):04o}, {len(entries)} kernels, {sum(entries) / 1e6:.2f} MB"
    found += f"; not used: {refusal}. {cache.ADVICE}" if refusal else ""
    yield Finding(subject="cache", found=found, ok=not refusal)


def _no_cache(folder: Path) -> Finding:
    """The finding for a cache folder that does not exist: whether it can be created."""
    existing = next(parent for parent in folder.parents if parent.exists() or parent.is_symlink())
    if os.access(existing, os.W_OK | os.X_OK) and existing.is_dir():
        return Finding(subject="cache", found=f"{shown_text(folder)}, does not exist yet")
    why = f"does not exist, and cannot be created in {shown_text(existing)}. {cache.ADVICE}"
    return Finding(subject="cache", found=f"{shown_text(folder)}, {why}", ok=False)


def _bundle() -> Iterator[Finding]:
    path = bundle_path()
    if path is None:
        yield Finding(subject="bundle", found="none (FP8MOE_BUNDLE is not set)")
        return
    manifest = read_bundle(path).manifest
    found = f"{shown_text(path)}, {len(manifest.kernels)} kernels compiled by {shown_text(manifest.compiler)}"
    yield Finding(subject="bundle", found=found, ok=True)


def _gpu() -> Iterator[Finding]:
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # there is no libcuda
        status = driver.CUresult.CUDA_ERROR_NO_DEVICE
    if status != driver.CUresult.CUDA_SUCCESS:
        yield Finding(
            subject="GPU", found=f"none ({status.name}): not needed to compile kernels, but to serve with them"
        )
        return
    _, version = driver.cuDriverGetVersion()
    _, count = driver.cuDeviceGetCount()
    for ordinal in range(count):
        _, device = driver.cuDeviceGet(ordinal)
        _, name = driver.cuDeviceGetName(64, device)
        attributes = driver.CUdevice_attribute
        _, major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        _, minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        hopper = (major, minor) == HOPPER
        title, cuda = name.split(b"\0")[0].decode(), f"{version // 1000}.{version % 1000 // 10}"
        what = f"{title}, compute capability {major}.{minor}, driver for CUDA {cuda}"
        refused = "" if hopper else "; refused by --quantization fp8moe, whose kernels need 9.0 (H100, H200, H20)"
        yield Finding(subject=f"GPU {ordinal}", found=what + refused, ok=hopper)


def _model(options: Options, report: Report, plan: kernels.Plan) -> Iterator[Finding]:
    """Check the model, if one is given, and add its kernels to `plan`."""
    if options.model is None:
        return
    model = read_checkpoint(options.model, report)
    plan |= kernels.plan_of(model)
    rank_shapes(model, options.parallel)
    good = f"{shown_text(options.model)} ({shown_text(model.architecture)}) can be split by {options.parallel}"
    yield Finding(subject="model", found="; ".join([good, *report.warnings]), ok=True)


def _kernels(report: Report, plan: kernels.Plan) -> Iterator[Finding]:
    report.kernels = kernels.look_up(plan)
    missing = [kernel for kernel in report.kernels if kernel.state != State.PRESENT]
    if not missing:
        yield Finding(subject="kernels", found=f"all {len(report.kernels)} are available", ok=True)
        return
    first = missing[0]
    found = (
        f"{len(report.kernels) - len(missing)} of {len(report.kernels)} are available; first missing: {first.kernel}: "
    )
    found += f"{first.detail}{_others(first.entry)}"
    forbidden = report.model is not None and settings().jit == "forbid"
    found += (
        "; FP8MOE_JIT=forbid refuses to start" if forbidden else "; missing kernels are compiled at startup if needed"
    )
    yield Finding(subject="kernels", found=found, ok=False if forbidden else None)


def _others(entry: str) -> str:
    """Note other versions of the kernel in the cache, if there are any."""
    source = entry.partition("-")[0]
    with contextlib.suppress(CacheError, OSError):
        others = [path for path in cache.cache_dir().glob(f"{source}-*.cubin") if path.name != entry]
        if others:
            return f" ({len(others)} of {source} exist from another compiler, other sources or options)"
    return ""
