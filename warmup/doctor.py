"""`doctor`: checks the kernels on this machine, the installed packages, and the conditions for serving."""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from fp8moe_plugin.errors import CacheError, Fp8MoeError
from fp8moe_plugin.jit import cache, sequence, toolchain, wheel
from fp8moe_plugin.jit.bundle import read_bundle
from fp8moe_plugin.jit.compiler import compiler_version, nvrtc_release, nvrtc_version
from fp8moe_plugin.jit.lookup import bundle_path
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.quoting import shown_text
from fp8moe_plugin.settings import Settings, settings, unknown_variables, variable
from fp8moe_plugin.terminal import fit
from warmup import all_to_all, diagnosis, engines, kernels, needs, tune
from warmup.diagnosis import Diagnosis, Driver, KernelCache
from warmup.model import check_split, read_checkpoint
from warmup.options import Options
from warmup.report import Finding, KernelReport, Report, State, installed

CHECKED_FOLDERS = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")
NOT_NEEDED = ("compiler", "cache", "wheel")  # where all kernels are available


def findings(options: Options, report: Report) -> list[Finding]:
    """Run all checks, and put the facts into `report.diagnosis`. A failed check is a finding, not an error."""
    facts = report.diagnosis = Diagnosis(machine=diagnosis.machine(), variables=diagnosis.variables())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    found = [Finding(subject="versions", found=versions), *_look("settings", lambda: _settings(facts))]
    if facts.settings is None:  # all other checks need the settings
        return [*found, _verdict(found, report)]
    looks: dict[str, Callable[[Diagnosis], Iterator[Finding]]] = {
        "engines": _engines,
        "compiler": lambda facts: _compiler(facts, options.kernels),
        "launcher": _launcher,
        "cache": _cache,
        "bundle": _bundle,
        "wheel": lambda facts: _wheel(facts, options.kernels),
        "GPU": _gpu,
        "tuning": tune.findings,
    }
    for subject, look in looks.items():
        found += _look(subject, lambda look=look: look(facts))  # type: ignore[misc]
    plan: kernels.Plan = {}
    found += _look("model", lambda: _model(options, report, plan))
    found += _look("kernels", lambda: _kernels(options, report, plan or kernels.plan_of(None, options.kernels)))
    found += _look("driver", lambda: _refusals(facts, report.kernels))
    if report.kernels and not _missing(report):
        found = [_not_needed(finding) if finding.subject in NOT_NEEDED else finding for finding in found]
    return [*found, _verdict(found, report)]


def _look(subject: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(look())
    except Fp8MoeError as error:
        return [Finding(subject=subject, found=str(error), ok=False)]


def _not_needed(finding: Finding) -> Finding:
    if finding.ok:
        return finding
    return Finding(subject=finding.subject, found=f"not needed, because all kernels are available; {finding.found}")


def _missing(report: Report) -> list[KernelReport]:
    return [kernel for kernel in report.kernels if kernel.state != State.PRESENT]


def _verdict(found: list[Finding], report: Report) -> Finding:
    """Returns the conclusion for serving from the findings, in one line."""
    assert report.diagnosis
    wrong = list(dict.fromkeys(finding.subject for finding in found if finding.ok is False))
    if wrong:
        return Finding(subject="verdict", found=f"not ready: correct what is WRONG: {', '.join(wrong)}", ok=False)
    needed = {"engine": report.diagnosis.engines, "GPU": report.diagnosis.gpus}
    lacking = [name for name, there in needed.items() if not there]
    if lacking:
        said = f"ready to compile kernels, but not to serve with them here: no {', no '.join(lacking)}"
    else:
        missing = len(_missing(report)) if report.model else 0
        said = "ready to serve" + (f", after compiling {missing} kernels at startup" if missing else "")
    unchecked = "" if report.model else "; no checkpoint was checked, as there is no --model"
    return Finding(subject="verdict", found=said + unchecked, ok=None if lacking else True)


def text(found: list[Finding]) -> str:
    marks = {True: "ok", False: "WRONG", None: ""}
    lines = []
    for finding in found:
        lines.append(fit(f"{marks[finding.ok]:5s}  {finding.subject}: {finding.found}", indent=7))
        lines += [f"       {finding.advice}"] if finding.advice else []  # one line, to copy
    return "\n".join(lines)


def _settings(facts: Diagnosis) -> Iterator[Finding]:
    facts.unknown_variables = unknown_variables()
    facts.settings = chosen = settings()
    given = [f"{variable(field)}={_shown_value(getattr(chosen, field))}" for field in Settings.model_fields]
    folders = [f"{name}={_shown_value(facts.variables.get(name))}" for name in CHECKED_FOLDERS]
    yield Finding(subject="settings", found=", ".join([*given, *folders]), ok=True)
    if facts.unknown_variables:
        names = ", ".join(map(shown_text, facts.unknown_variables))
        yield Finding(subject="unknown variables", found=f"{names}: they are ignored. Correct or unset them")


def _shown_value(value: object) -> str:
    """Returns a setting in the form of its environment variable."""
    if value is None:
        return "(unset)"
    return str(int(value)) if isinstance(value, bool) else shown_text(value)


def _engines(facts: Diagnosis) -> Iterator[Finding]:
    facts.engines = list(engines.installed_engines())
    yield from engines.findings(facts.engines)


def _compiler(facts: Diagnosis, target: str) -> Iterator[Finding]:
    facts.compiler = compiler_version(target)
    release, bindings = nvrtc_release()[0] if target == SM90 else None, installed("cuda-bindings") or ""
    cuda = bindings.partition(".")[0]
    if release is None or not cuda.isdecimal() or release <= int(cuda):  # drivers accept kernels of older CUDAs
        yield Finding(subject="compiler", found=facts.compiler, ok=True)
        return
    # cuda-bindings loads the newest NVRTC that is installed, of any CUDA.
    found = f"{facts.compiler}, while cuda-bindings {bindings} is for CUDA {cuda}: drivers for CUDA {cuda} refuse its "
    found += f"kernels. If yours is one, uninstall the package that brings NVRTC {release} (nvidia-cuda-nvrtc)"
    yield Finding(subject="compiler", found=found)


def _launcher(facts: Diagnosis) -> Iterator[Finding]:
    try:
        sequence.extension()
    except ImportError as error:
        facts.launcher = "cuda-bindings"
        yield Finding(subject="launcher", found=f"cuda-bindings: {sequence.WITHOUT_EXTENSION} ({shown_text(error)})")
    else:
        facts.launcher = "C extension"
        yield Finding(subject="launcher", found="C extension", ok=True)


def _cache(facts: Diagnosis) -> Iterator[Finding]:
    folder = cache.cache_dir()
    shown = shown_text(folder)
    facts.cache = found = KernelCache(path=str(folder), exists=True)
    try:
        if cache.is_dangling_link(folder):
            found.refusal = cache.DANGLING_LINK
            yield Finding(subject="cache", found=f"{shown}: {found.refusal}. {cache.ADVICE}", ok=False)
            return
        status = folder.stat()
        _describe_cache(found, folder, status)
    except FileNotFoundError:
        found.exists = False
        refusal = cache.why_not_creatable(folder)
        yield Finding(subject="cache", found=refusal or f"{shown}, does not exist yet", ok=False if refusal else None)
        return
    except OSError as error:
        found.refusal = error.strerror
        yield Finding(subject="cache", found=f"{shown}: {error.strerror}. {cache.ADVICE}", ok=False)
        return
    content = f"{shown}, mode {found.mode}, {found.kernels} kernels, {found.bytes / 1e6:.2f} MB"
    if found.refusal:
        content += f"; not used: {found.refusal}. {cache.ADVICE}"
    else:
        content += ("" if os.access(folder, os.W_OK) else ", read-only") + _other_compilers()
    yield Finding(subject="cache", found=content, ok=not found.refusal)


def _describe_cache(found: KernelCache, folder: Path, status: os.stat_result) -> None:
    """Fill in the content of a cache folder, and the reason why it is not used, if any. Raises `OSError`."""
    entries = [entry.lstat().st_size for entry in folder.glob("*.cubin")]
    found.kernels, found.bytes = len(entries), sum(entries)
    found.mode = f"{stat.S_IMODE(status.st_mode):04o}"
    found.refusal = cache.folder_refusal(status) if stat.S_ISDIR(status.st_mode) else "it is not a folder"
    if not found.refusal and not os.access(folder, os.R_OK | os.X_OK):
        found.refusal = "it cannot be read"
    if not found.refusal:
        found.compilers = toolchain.cache_compilers(folder)


def _other_compilers() -> str:
    others = toolchain.other_compilers()
    if not others:
        return ""
    return f"; those of other compilers are not used ({toolchain.listed(others)}), as this one is {nvrtc_version()}"


def _bundle(facts: Diagnosis) -> Iterator[Finding]:
    path = bundle_path()
    if path is None:
        yield Finding(subject="bundle", found="none (FP8MOE_BUNDLE is not set)")
        return
    bundle = read_bundle(path)
    bundle.check()
    facts.bundle = diagnosis.kernel_bundle(path, bundle)
    yield Finding(subject="bundle", found=str(facts.bundle), ok=True)


def _wheel(facts: Diagnosis, target: str) -> Iterator[Finding]:
    try:
        shipped = wheel.installed_kernels(target)
    except CacheError as error:
        yield Finding(subject="wheel", found=str(error), ok=False)
        return
    if shipped is None:
        yield Finding(subject="wheel", found=f"no kernels for {target} were installed with the plugin")
        return
    facts.wheel = diagnosis.kernel_bundle(wheel.kernels_file(), shipped)
    yield Finding(subject="wheel", found=str(facts.wheel), ok=True)


def _gpu(facts: Diagnosis) -> Iterator[Finding]:
    looked = diagnosis.driver_and_gpus()
    if isinstance(looked, str):
        yield Finding(subject="GPU", found=f"none ({looked}): not needed to compile kernels, but to serve with them")
        return
    facts.driver, facts.gpus = looked
    for gpu in facts.gpus:
        what = f"{gpu.name}, {gpu.memory_bytes / 1e9:.1f} GB, compute capability {gpu.compute_capability}, "
        served = f"backend {gpu.backend}" if gpu.served else f"refused by --quantization fp8moe: {gpu.refusal}"
        found = f"{what}{_driver(facts.driver)}; {served}"
        yield Finding(subject=f"GPU {gpu.ordinal}", found=found, ok=gpu.served)
    yield from all_to_all.links(facts.gpus)


def _driver(driver: Driver) -> str:
    return f"driver {driver.version} for CUDA {driver.cuda}" if driver.version else f"driver for CUDA {driver.cuda}"


def _model(options: Options, report: Report, plan: kernels.Plan) -> Iterator[Finding]:
    """Check the model, if one is given, and add its kernels to `plan`."""
    if options.model is None:
        return
    model = read_checkpoint(options.model, report, options.revision, options.download_dir)
    plan |= kernels.plan_of(model, options.kernels, options.parallel)
    check_split(model, options.parallel, report)
    good = f"{shown_text(options.model)} ({shown_text(model.architecture)}) can be split by {options.parallel}"
    yield Finding(subject="model", found="; ".join([good, *report.warnings]), ok=True)
    assert report.diagnosis
    yield from needs.findings(model, report.diagnosis)
    yield from all_to_all.findings(model, options.parallel, options.max_tokens, report.diagnosis.gpus)
    if report.diagnosis.gpus:
        yield from needs.memory_findings(model, options, report.diagnosis.gpus)


def _kernels(options: Options, report: Report, plan: kernels.Plan) -> Iterator[Finding]:
    report.kernels = kernels.look_up(plan)
    missing = _missing(report)
    if not missing:
        yield Finding(subject="kernels", found=f"all {len(report.kernels)} are available", ok=True)
        return
    first, there = missing[0], len(report.kernels) - len(missing)
    found = f"{there} of {len(report.kernels)} are available; first missing: {first.kernel}: "
    found += (first.detail or "").rstrip(".") + _others(first, report.kernels)
    forbid = settings().jit == "forbid"
    if forbid:
        found += "; FP8MOE_JIT=forbid refuses " + ("to start" if report.model else "models that need missing ones")
    elif cache.why_not_usable():
        found += "; missing kernels are compiled at every start, because the cache cannot keep them"
    else:
        found += "; missing kernels are compiled at startup if needed"
    advice = None
    if report.model or not options.model:  # else the command would fail
        command, serve = kernels.remedy(options, bundle_path())
        advice = f"Run `{command}`{serve}."
    yield Finding(subject="kernels", found=found, ok=False if forbid and report.model else None, advice=advice)


def _refusals(facts: Diagnosis, found: list[KernelReport]) -> Iterator[Finding]:
    """Compare the driver with the compilers of the kernels, also of those that would be compiled."""
    if not facts.driver:
        return
    archives = {shown_text(archive.path): archive.compiler for archive in (facts.bundle, facts.wheel) if archive}
    compilers = dict.fromkeys(archives.get(kernel.place or "", facts.compiler) for kernel in found)
    for compiler in filter(None, compilers):
        compiled = re.match(r"nvrtc (\d{1,3})\.", compiler)
        if compiled and int(compiled[1]) > int(facts.driver.cuda.partition(".")[0]):
            refused = f"supports CUDA {facts.driver.cuda}, and refuses kernels compiled by {shown_text(compiler)}"
            yield Finding(subject="driver", found=f"{refused}. Update it, or install fp8moe-plugin[cu12]", ok=False)


def _others(missing: KernelReport, wanted: list[KernelReport]) -> str:
    """Note other versions of a missing kernel in the cache, if there are any."""
    source, names = missing.entry.partition("-")[0], {kernel.entry for kernel in wanted}
    with contextlib.suppress(CacheError, OSError):
        others = [path for path in cache.cache_dir().glob(f"{source}-*.cubin") if path.name not in names]
        if others:
            return f" ({len(others)} of {source} exist from another compiler, other sources or options)"
    return ""
