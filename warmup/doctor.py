"""`doctor`: where kernels come from on this machine and why not, what is installed, and what would be refused."""

import os
import stat
from collections.abc import Callable, Iterator

from fp8moe_plugin.errors import Fp8MoeError
from fp8moe_plugin.jit import cache
from fp8moe_plugin.jit.bundle import read_bundle
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.settings import Settings, settings, variable
from fp8moe_plugin.shapes import rank_shapes
from warmup import kernels
from warmup.model import read_checkpoint
from warmup.options import Options
from warmup.report import Finding, Report, State


def findings(options: Options, report: Report) -> list[Finding]:
    """Everything that was looked at; what fails is a finding, not an error."""
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("settings", _settings),
        ("compiler", _compiler),
        ("cache", _cache),
        ("bundle", _bundle),
        ("GPU", _gpu),
        ("model", lambda: _model(options, report)),
        ("kernels", lambda: _kernels(options, report)),
    ]
    found = [Finding(subject="versions", found=", ".join(f"{name} {v}" for name, v in report.versions.items()))]
    for subject, look in looks:
        try:
            found += look()
        except Fp8MoeError as error:
            found.append(Finding(subject=subject, found=str(error), ok=False))
            if subject == "settings":  # all that follows reads them
                break
    return found


def text(found: list[Finding]) -> str:
    marks = {True: "ok", False: "WRONG", None: ""}
    return "\n".join(f"{marks[finding.ok]:5s}  {finding.subject}: {finding.found}" for finding in found)


def _settings() -> Iterator[Finding]:
    chosen = settings()
    given = [f"{variable(field)}={getattr(chosen, field)}" for field in Settings.model_fields]
    folders = [f"{name}={os.environ.get(name)}" for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")]
    yield Finding(subject="settings", found=", ".join([*given, *folders]), ok=True)


def _compiler() -> Iterator[Finding]:
    yield Finding(subject="compiler", found=nvrtc_version(), ok=True)


def _cache() -> Iterator[Finding]:
    folder = cache.cache_dir()
    if not folder.is_dir():
        yield Finding(subject="cache", found=f"{folder}, not there yet")
        return
    status = folder.stat()
    entries = [entry.stat().st_size for entry in folder.glob("*.cubin")]
    refusal = cache.folder_refusal(status) or ("" if os.access(folder, os.R_OK | os.X_OK) else "it cannot be read")
    found = f"{folder}, mode {stat.S_IMODE(status.st_mode):04o}, {len(entries)} kernels, {sum(entries) / 1e6:.2f} MB"
    yield Finding(subject="cache", found=f"{found}; not used: {refusal}" if refusal else found, ok=not refusal)


def _bundle() -> Iterator[Finding]:
    path = settings().bundle
    if path is None:
        yield Finding(subject="bundle", found="none (FP8MOE_BUNDLE is not set)")
        return
    manifest = read_bundle(path).manifest
    yield Finding(subject="bundle", found=f"{path}, {len(manifest.kernels)} kernels by {manifest.compiler}", ok=True)


def _gpu() -> Iterator[Finding]:
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # there is no libcuda
        status = driver.CUresult.CUDA_ERROR_NO_DEVICE
    if status != driver.CUresult.CUDA_SUCCESS:
        yield Finding(subject="GPU", found=f"none ({status.name}): enough to compile, not to serve with the kernels")
        return
    _, version = driver.cuDriverGetVersion()
    _, count = driver.cuDeviceGetCount()
    for ordinal in range(count):
        _, device = driver.cuDeviceGet(ordinal)
        _, name = driver.cuDeviceGetName(64, device)
        attributes = driver.CUdevice_attribute
        _, major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        _, minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        hopper = (major, minor) == (9, 0)
        title, cuda = name.split(b"\0")[0].decode(), f"{version // 1000}.{version % 1000 // 10}"
        what = f"{title}, compute capability {major}.{minor}, driver for CUDA {cuda}"
        refused = "" if hopper else "; --quantization fp8moe refuses it, the kernels need 9.0 (H100, H200, H20)"
        yield Finding(subject=f"GPU {ordinal}", found=what + refused, ok=hopper)


def _model(options: Options, report: Report) -> Iterator[Finding]:
    if options.model is None:
        return
    model = read_checkpoint(options.model, report)
    rank_shapes(model, options.parallel)
    good = f"{options.model} ({model.architecture}) can be spread by {options.parallel}"
    yield Finding(subject="model", found="; ".join([good, *report.warnings]), ok=model.quantized)


def _kernels(options: Options, report: Report) -> Iterator[Finding]:
    model = read_checkpoint(options.model, Report(command="doctor")) if options.model else None
    report.kernels = kernels.look_up(kernels.plan_of(model))
    missing = [kernel for kernel in report.kernels if kernel.state != State.PRESENT]
    found = f"{len(report.kernels) - len(missing)} of {len(report.kernels)} are there"
    if missing:
        found += f"; first miss: {missing[0].kernel}: {missing[0].detail}{_others(missing[0].entry)}"
    forbidden = settings().jit == "forbid"
    if missing and model:
        found += "; FP8MOE_JIT=forbid refuses to start" if forbidden else "; they are compiled at start"
    yield Finding(subject="kernels", found=found, ok=True if not missing else False if model and forbidden else None)


def _others(entry: str) -> str:
    """Whether the cache holds the same kernel from other sources or of another compiler."""
    source = entry.partition("-")[0]
    others = len(list(cache.cache_dir().glob(f"{source}-*.cubin")))
    return f" ({others} of {source} by another compiler, of other sources or options are there)" if others else ""
