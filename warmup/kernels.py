"""`list`, `verify` and `compile`: list the kernels that a checkpoint needs, check that they exist, compile the rest."""

import contextlib
import ctypes
import errno
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import active_children, get_context, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from fp8moe_plugin import terminal
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.placement import Server
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.splits import place_rank_experts
from fp8moe_plugin.errors import CacheError, CompileError, UnsupportedError
from fp8moe_plugin.jit import bundle, cache, lookup
from fp8moe_plugin.jit.compiler import compiler_version, entry_name
from fp8moe_plugin.jit.wheel import complete_kernels, installed_kernels
from fp8moe_plugin.launches.kernel_sets import all_kernels, model_kernels
from fp8moe_plugin.plan.keys import SM90, KernelKey
from fp8moe_plugin.quoting import shell_word, shown_text
from warmup import interrupts
from warmup.options import Options
from warmup.report import KernelReport, State

ALONE = Parallel()
Plan = dict[KernelKey, str]  # the kernels to compile, each with the reason
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PATIENCE_S = 180  # 60 times the time of the slowest kernel, and longer than any wait for another process's lock
Outcome = dict[str, Any]  # fields of a KernelReport


class Stored(NamedTuple):
    """A kernel that is available."""

    cubin: bytes
    place: str  # the path of the bundle, cache or wheel's file that contains it
    compiler: str


def plan_of(model: Model | None, target: str = SM90, parallel: Parallel = ALONE) -> Plan:
    """Returns the kernels of a checkpoint, or all kernels, for a target: see `launches.kernel_sets`.

    Args:
        parallel: with it, the engine may compute the experts.
    """
    if model is None:
        return dict.fromkeys(all_kernels(target), "every existing kernel")
    if place_rank_experts(model, parallel).server is Server.ENGINE:
        model = replace(model, experts=replace(model.experts, layers=0))
    return model_kernels(model, target)


def look_up(plan: Plan) -> list[KernelReport]:
    """Look up each kernel in the bundle, the cache and the wheel, like an engine."""

    def find(key: KernelKey) -> Stored:
        cubin, origin = lookup.find(key)
        return Stored(cubin, lookup.place(origin).strip(), lookup.compiler_of(origin, key.target))

    return [_report(key, why, find) for key, why in plan.items()]


def remedy(options: Options, archive: Path | None) -> lookup.Remedy:
    """Returns how to make the kernels of a command line available, in a bundle if one is in use."""
    model = f" --model {shell_word(options.model)} {options.parallel}" if options.model else ""
    return lookup.remedy(lookup.WARMUP + model + lookup.gpu_option(options.kernels), archive)


def look_into(archive: Path, plan: Plan) -> list[KernelReport]:
    """Look up each kernel in a bundle. Raises `CacheError` if the file is not a bundle."""
    return _look_into(bundle.read_bundle(archive), shown_text(archive), plan)


def _look_into(kernels: bundle.Bundle, place: str, plan: Plan) -> list[KernelReport]:
    compiler = kernels.manifest.compiler

    def find(key: KernelKey) -> Stored:
        return Stored(kernels.cubin(key), place, compiler)

    return [_report(key, why, find, compiler) for key, why in plan.items()]


def compile_missing(plan: Plan) -> list[KernelReport]:
    """Compile the kernels that the cache lacks, on all cores. Finished kernels are kept even if others fail.

    If the wheel has all of them, none is compiled.

    Progress goes to standard error: a bar on a terminal, otherwise a line per kernel.

    Raises:
        CacheError: the cache cannot be used.
        CompileError: the compiling processes hang.
        UnsupportedError: this machine cannot run compiling processes.
    """
    if wheel := complete_kernels(plan):
        return _look_into(wheel, lookup.place(lookup.Origin.WHEEL).strip(), plan)
    reports = {key: _in_cache(key, why) for key, why in plan.items()}
    missing = [key for key, report in reports.items() if report.state != State.PRESENT]
    if not missing:
        return list(reports.values())
    cache.require_usable()
    progress = tqdm(total=len(missing), unit="kernel", desc="compiling", disable=None)
    with _pool(len(missing)) as pool, progress as bar:
        with interrupts.held_back(*interrupts.ENDING):  # a process interrupted during its start would print a traceback
            futures = {_submit(pool, key): key for key in missing}
        for done, future in enumerate(_as_completed(futures), start=1):
            key = futures[future]
            reports[key] = reports[key].model_copy(update=_outcome(future))
            bar.update()
            if bar.disable:
                print(f"[{done}/{len(missing)}] {_line(reports[key])}", file=sys.stderr, flush=True)
    return list(reports.values())


def _submit(pool: ProcessPoolExecutor, key: KernelKey) -> Future[Outcome]:
    """Submit a kernel. If a process dies while others are being started, the pool is already broken here."""
    try:
        return pool.submit(_compile, key)
    except BrokenProcessPool as error:
        broken: Future[Outcome] = Future()
        broken.set_exception(error)
        return broken


@contextlib.contextmanager
def _pool(tasks: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that compile; none of them outlives this process, however it ends.

    They are spawned, because NVRTC does not survive a fork. Killing them is safe: cache entries are written atomically.
    """
    pool = _new_pool(tasks)
    try:
        yield pool
    except BaseException:
        for process in active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _new_pool(tasks: int) -> ProcessPoolExecutor:
    resource_tracker.ensure_running()  # removes the pool's semaphores, so it must exist before them
    processes = min(tasks, len(os.sched_getaffinity(0)))
    try:
        return ProcessPoolExecutor(processes, get_context("spawn"), _prepare_worker, (os.getpid(),))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise UnsupportedError(
            f"The compiling processes need semaphores in /dev/shm, which cannot be created: {error.strerror}. "
            "Mount /dev/shm as a writable tmpfs with free space."
        ) from error


def _prepare_worker(parent: int) -> None:
    """Leave a terminal's interrupt to the parent, and die with the parent, even if it is killed by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl, which then sends no signal
        os._exit(1)


def _as_completed(futures: Collection[Future[Outcome]]) -> Iterator[Future[Outcome]]:
    """Yields the futures in the order of completion. Raises `CompileError` if none finishes within PATIENCE_S."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, PATIENCE_S, FIRST_COMPLETED)
        if not done:
            raise CompileError(
                f"No kernel was compiled for {PATIENCE_S} s, so the compiling processes were stopped. The compiler "
                "may need more memory: raise the limit (ulimit -v), and run the command again to continue."
            )
        yield from done


def _compile(key: KernelKey) -> Outcome:
    """Compile a kernel, in a process of the pool."""
    start = time.perf_counter()
    try:
        made = lookup.compile_into_cache(key)
    except CompileError as error:
        return {"state": State.FAILED, "detail": str(error)}
    except (ImportError, MemoryError, OSError) as error:
        return {"state": State.FAILED, "detail": f"the compiler could not run: {type(error).__name__}: {error}"}
    if made.not_kept:
        return {"state": State.FAILED, "detail": f"compiled, but {made.not_kept}"}
    seconds = round(time.perf_counter() - start, 3)
    detail = "; ".join(made.faults) or None
    return {"state": State.COMPILED, "detail": detail, "seconds": seconds, **_content(made.cubin)}


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return {
            "state": State.FAILED,
            "detail": "a compiling process was killed; run the command again, finished kernels are kept",
        }


def _in_cache(key: KernelKey, why: str) -> KernelReport:
    compiler = compiler_version(key.target)
    return _report(key, why, lambda key: Stored(_cached(key), shown_text(cache.cache_dir()), compiler))


def _report(key: KernelKey, why: str, find: Callable[[KernelKey], Stored], compiler: str | None = None) -> KernelReport:
    """Returns the state of a kernel.

    Args:
        find: returns the kernel, or raises `Missing`.
        compiler: determines the name of a missing entry.
    """
    known = {"kernel": str(key), "why": why}
    try:
        found = find(key)
    except cache.Missing as missing:
        state = State.DAMAGED if isinstance(missing, cache.Damaged) else State.MISSING
        entry = entry_name(key, compiler or _compiler(key))
        return KernelReport(**known, entry=entry, state=state, detail=str(missing))
    entry = entry_name(key, found.compiler)
    return KernelReport(**known, entry=entry, state=State.PRESENT, place=found.place, **_content(found.cubin))


def _content(cubin: bytes) -> dict[str, Any]:
    return {"size": len(cubin), "sha256": hashlib.sha256(cubin).hexdigest()}


def _cached(key: KernelKey) -> bytes:
    return cache.read(entry_name(key, compiler_version(key.target)), key.target)


def _compiler(key: KernelKey) -> str:
    """Returns the installed compiler, else that of the bundle in use or of the wheel.

    Raises:
        CompileError, CacheError: there is none of them, or the file cannot be read.
    """
    try:
        return compiler_version(key.target)
    except CompileError:
        archive = lookup.bundle_path()
        kernels = bundle.read_bundle(archive) if archive else installed_kernels(key.target)
        if kernels is None:
            raise
        return kernels.manifest.compiler


def _line(report: KernelReport) -> str:
    took = f" in {report.seconds:.1f} s" if report.seconds else ""
    return f"{report.state:8s} {report.kernel}{took}" + (f": {report.detail}" if report.detail else "")


def write_bundle(path: Path, plan: Plan) -> bytes:
    """Write kernels from the wheel to a bundle if it has all of them, otherwise from the cache. Returns its bytes.

    Raises:
        CacheError: a kernel was removed from the cache, or the bundle cannot be written.
    """
    wheel = complete_kernels(plan)
    find, compiler = (wheel.cubin, wheel.manifest.compiler) if wheel else (_cached, None)
    try:
        return bundle.write_bundle(path, {key: find(key) for key in plan}, compiler)
    except cache.Missing as missing:
        raise CacheError(
            f"A kernel was removed from the cache in the meantime: {missing}. Run the command again."
        ) from missing


def table(reports: list[KernelReport]) -> str:
    """Returns a row per kernel with its state and the reason why it is needed."""
    return terminal.table("<<<", ((report.state, report.kernel, report.why) for report in reports))
