"""`list`, `verify` and `compile`: the kernels of a plan, whether they are there, and making those that are not."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fp8moe_plugin.errors import CacheError, CompileError
from fp8moe_plugin.jit import bundle, cache, lookup
from fp8moe_plugin.jit.compiler import entry_name, nvrtc_version
from fp8moe_plugin.plan import KernelKey, all_kernels, model_kernels
from fp8moe_plugin.shapes import Model
from warmup.report import KernelReport, State

Plan = dict[KernelKey, str]  # and why
Outcome = dict[str, Any]  # fields of a KernelReport


def plan_of(model: Model | None) -> Plan:
    """The kernels of a checkpoint, or all there are."""
    return model_kernels(model) if model else dict.fromkeys(all_kernels(), "every kernel there is")


def look_up(plan: Plan) -> list[KernelReport]:
    """What serving would find of each kernel, in the bundle or in the cache."""
    reports = []
    for key, why in plan.items():
        try:
            found = lookup.find(key)
        except cache.Missing as missing:
            reports.append(_absent(key, why, missing))
        else:
            reports.append(_present(key, why, found.cubin, lookup.place(found.origin).strip()))
    return reports


def compile_missing(plan: Plan) -> list[KernelReport]:
    """Compile what the cache lacks, on all cores; what is done stays done, whatever happens to the rest.

    Progress goes to standard error: a bar on a terminal, else a line for each kernel.

    Raises:
        CacheError: the cache cannot be used.
    """
    cache.require_usable()
    reports = {key: _in_cache(key, why) for key, why in plan.items()}
    missing = [key for key, report in reports.items() if report.state != State.PRESENT]
    if not missing:
        return list(reports.values())
    with tqdm(total=len(missing), unit="kernel", desc="compiling", disable=None) as bar:
        for done, (key, outcome) in enumerate(_compile_all(missing), start=1):
            reports[key] = reports[key].model_copy(update=outcome)
            bar.update()
            if bar.disable:
                print(f"[{done}/{len(missing)}] {_line(reports[key])}", file=sys.stderr, flush=True)
    return list(reports.values())


def _compile_all(keys: list[KernelKey]) -> Iterator[tuple[KernelKey, Outcome]]:
    """What became of each kernel, as soon as it is known."""
    workers = min(len(keys), len(os.sched_getaffinity(0)))
    # Spawned, as NVRTC does not survive a fork. A terminal's interrupt reaches them too, but this process heeds it.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        futures = {pool.submit(_compile, key): key for key in keys}
        for future in as_completed(futures):
            yield futures[future], _outcome(future)
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(key: KernelKey) -> Outcome:
    """Runs in a process of the pool."""
    start = time.perf_counter()
    try:
        made = lookup.compile_into_cache(key)
    except CompileError as error:
        return {"state": State.FAILED, "detail": str(error)}
    if made.not_kept:
        return {"state": State.FAILED, "detail": f"compiled, but {made.not_kept}"}
    seconds = round(time.perf_counter() - start, 3)
    detail = "; ".join(made.faults) or None
    return {"state": State.COMPILED, "detail": detail, "seconds": seconds, **_content(made.cubin)}


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return {"state": State.FAILED, "detail": "a compiling process was killed; run again, what is done is kept"}


def _in_cache(key: KernelKey, why: str) -> KernelReport:
    try:
        return _present(key, why, cache.read(_entry(key)), str(cache.cache_dir()))
    except cache.Missing as missing:
        return _absent(key, why, missing)


def _present(key: KernelKey, why: str, cubin: bytes, place: str) -> KernelReport:
    content = _content(cubin)
    return KernelReport(kernel=str(key), why=why, entry=_entry(key), state=State.PRESENT, place=place, **content)


def _absent(key: KernelKey, why: str, missing: cache.Missing) -> KernelReport:
    state = State.DAMAGED if isinstance(missing, cache.Damaged) else State.MISSING
    return KernelReport(kernel=str(key), why=why, entry=_entry(key), state=state, detail=str(missing))


def _content(cubin: bytes) -> dict[str, Any]:
    return {"size": len(cubin), "sha256": hashlib.sha256(cubin).hexdigest()}


def _entry(key: KernelKey) -> str:
    return entry_name(key, nvrtc_version())


def _line(report: KernelReport) -> str:
    took = f" in {report.seconds:.1f} s" if report.seconds else ""
    return f"{report.state:8s} {report.kernel}{took}" + (f": {report.detail}" if report.detail else "")


def write_bundle(path: Path, plan: Plan) -> int:
    """Write the kernels, which the cache has, into an archive; returns its size in bytes.

    Raises:
        CacheError: a kernel has gone from the cache, or the archive cannot be written.
    """
    try:
        bundle.write_bundle(path, {key: cache.read(_entry(key)) for key in plan})
        return path.stat().st_size
    except cache.Missing as missing:
        raise CacheError(f"A kernel has gone from the cache meanwhile: {missing}. Run the command again.") from missing
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from error


def table(reports: list[KernelReport]) -> str:
    """A line for each kernel: its state, and why it is needed."""
    width = max(len(report.kernel) for report in reports)
    return "\n".join(f"{report.state:8s}  {report.kernel:{width}s}  {report.why}" for report in reports)
