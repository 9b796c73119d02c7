"""Runs the commands, with text on standard output and a report for `--json`."""

import contextlib
import hashlib
import sys
import time
from pathlib import Path

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.errors import CacheError, UnsupportedError
from fp8moe_plugin.jit import cache, lookup, toolchain
from fp8moe_plugin.jit.bundle import read_bundle
from fp8moe_plugin.jit.compiler import nvrtc_version
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.spec import MoeShape
from fp8moe_plugin.quoting import shell_word
from fp8moe_plugin.terminal import fit
from warmup import interrupts, kernels, streams
from warmup.failures import as_text, failure_reported, print_error
from warmup.model import check_split, read_checkpoint, warn
from warmup.options import STDOUT, Options, parse
from warmup.report import BundleReport, Report, State

GOOD = (State.PRESENT, State.COMPILED)
LIMIT_FAILED = 3  # exit status


def run(arguments: list[str] | None) -> int:
    """Parse the command line and run its command. Returns the exit status."""
    try:
        Path.cwd()
    except OSError as error:
        print_error(f"The current folder cannot be used: {error.strerror}. Change to another folder.")
        return 1
    options = parse(arguments)
    report = Report(command=options.command, parallel=str(options.parallel), arch=options.kernels)
    done = False
    alone = options.json == STDOUT  # only the report; texts go to the same stream as progress
    with failure_reported(report):
        with contextlib.redirect_stdout(sys.stderr) if alone else contextlib.nullcontext():
            done = RUN[options.command](options, report)
        streams.require_output()
    if options.json:
        with failure_reported(report):
            _write_report(report, options.json)
    if not done or report.error is not None:
        return 1
    return 0 if report.compare is None or report.compare.passed else LIMIT_FAILED


def _write_report(report: Report, path: Path) -> None:
    if path == STDOUT:
        sys.stdout.write(report.as_json())
        streams.require_output()
        return
    try:
        report.write(path)
    except OSError as error:
        raise UnsupportedError(f"{as_text(path)} cannot be written: {error.strerror}. Choose another file.") from error


def compile_kernels(options: Options, report: Report) -> bool:
    plan = kernels.plan_of(_checked_model(options, report), options.kernels, options.parallel)
    start = time.perf_counter()
    try:
        report.kernels = kernels.compile_missing(plan)
    except CacheError as error:
        command, serve = kernels.remedy(options, options.bundle or lookup.bundle_path())
        raise CacheError(f"{error} Or run `{command}`{serve}.") from error
    report.seconds = round(time.perf_counter() - start, 3)
    for kernel in report.kernels:
        if kernel.detail and kernel.state in (State.COMPILED, State.FAILED):
            warn(report, f"{kernel.kernel}: {kernel.detail}")
    others = toolchain.other_compilers() if _count(report, State.COMPILED) else {}
    if others:
        made = f"the cache also has kernels that other compilers made ({toolchain.listed(others)})"
        warn(report, f"{made}, which are not used: this machine's is {nvrtc_version()}")
    counts = ", ".join(f"{_count(report, state)} {state}" for state in (*GOOD, State.FAILED))
    print(f"{len(plan)} kernels: {counts}, in {report.seconds:.1f} s; {_where(report)}")
    good = all(kernel.state in GOOD for kernel in report.kernels)
    if good and options.bundle:
        _write_bundle(options, report, plan)
    return good


def _where(report: Report) -> str:
    """Returns where the kernels are that `compile_missing` reported: all in the wheel, or all in the cache."""
    wheel = lookup.place(lookup.Origin.WHEEL).strip()
    in_wheel = any(kernel.place == wheel for kernel in report.kernels)
    return f"wheel {as_text(wheel)}" if in_wheel else f"cache {as_text(cache.cache_dir())}"


def _write_bundle(options: Options, report: Report, plan: kernels.Plan) -> None:
    assert options.bundle
    path, content = options.bundle.absolute(), kernels.write_bundle(options.bundle.absolute(), plan)
    digest = hashlib.sha256(content).hexdigest()
    report.bundle = BundleReport(path=str(path), sha256=digest, size=len(content), kernels=len(plan))
    print(f"{as_text(path)}: {len(plan)} kernels, {len(content) / 1e6:.2f} MB, sha256 {digest}")
    variable = f"FP8MOE_BUNDLE={shell_word(str(path))}"
    print(f"Serve with {variable}, and with FP8MOE_JIT=forbid to make sure that nothing is compiled.")


def list_kernels(options: Options, report: Report) -> bool:
    plan = kernels.plan_of(_checked_model(options, report), options.kernels, options.parallel)
    report.kernels = kernels.look_up(plan)
    print(kernels.table(report.kernels))
    print(_summary(report))
    return True


def verify(options: Options, report: Report) -> bool:
    """With a bundle, check only the bundle: the machine that serves from it may have no cache."""
    plan = kernels.plan_of(_checked_model(options, report), options.kernels, options.parallel)
    bundle = options.bundle or lookup.bundle_path()
    report.kernels = kernels.look_into(bundle, plan) if bundle else kernels.look_up(plan)
    bad = [kernel for kernel in report.kernels if kernel.state != State.PRESENT]
    for kernel in bad:
        print(fit(f"{kernel.state} {kernel.kernel}: {as_text(kernel.detail or '')}", indent=2))
    print(_summary(report))
    if bad:
        command, serve = kernels.remedy(options, bundle)
        print(f"Run `{command}`{serve}{_made_for(bundle, options.kernels)}.")
    return not bad


def _made_for(bundle: Path | None, target: str) -> str:
    """Returns what to do with a bundle of kernels for other GPUs than `target`, instead of replacing it."""
    made_for = read_bundle(bundle).manifest.arch if bundle else target
    if made_for == target:
        return ""
    gpu = lookup.gpu_option(made_for)
    return f" to replace it, or verify it {f'with{gpu}' if gpu else 'without --gpu'}"


def _summary(report: Report) -> str:
    places = ", ".join(sorted({as_text(kernel.place) for kernel in report.kernels if kernel.place}))
    where = f", in {places}" if places else ""
    return f"{len(report.kernels)} kernels, {_count(report, State.PRESENT)} present and intact{where}"


def explain(options: Options, report: Report) -> bool:
    with interrupts.held_back(*interrupts.ENDING):  # while numpy is imported, it turns them into an ImportError
        from warmup import choose
        from warmup import explain as explanation

    model = _checked_model(options, report)
    assert model
    assert options.model
    report.explain = explanation.explain(model, options.parallel, options.max_tokens, options.capture_sizes)
    if options.target is None:
        print(explanation.text(model, options.parallel, report.explain, options.max_tokens))
        return True
    assert report.model
    report.explain.choice = choose.choose(model, options.target, options.model, report.model.remote_code)
    print(choose.text(report.explain.choice, report.model.remote_code))
    return any(split.fits for split in report.explain.choice.splits)


def doctor(options: Options, report: Report) -> bool:
    from warmup import doctor as examination

    report.doctor = examination.findings(options, report)
    print(examination.text(report.doctor))
    return all(finding.ok is not False for finding in report.doctor)


def bench(options: Options, report: Report) -> bool:
    from fp8moe_plugin.bench import layer as benchmark
    from fp8moe_plugin.bench.result import check_plot, plot, table

    model = _checked_model(options, report)
    assert model
    if options.plot:
        check_plot()
    layer = benchmark.rank_layer(model, options.parallel)
    spec, *_ = model_specs(model, MoeShape.of(layer, layer.experts))
    report.bench = benchmark.bench_layer(layer, options.tokens or benchmark.TOKENS, spec, _progress)
    print(table(report.bench))
    if options.plot:
        plot(report.bench, options.plot)
    return True


def tune(options: Options, report: Report) -> bool:
    from warmup import tune as tuner

    assert options.out
    report.tune = tuner.measure(options, _checked_model(options, report), _progress)
    print(tuner.text(report.tune))
    tuner.write(report.tune, options.out)
    return True


def compare(options: Options, report: Report) -> bool:
    from fp8moe_plugin.bench.result import check_plot
    from fp8moe_plugin.compare.plot import plot
    from fp8moe_plugin.compare.result import table
    from warmup import compare as comparison
    from warmup.compare_servers import prepare_servers

    model = _checked_model(options, report)
    if options.plot:
        check_plot()
    prepared = comparison.prepare(options, model) if model else prepare_servers(options)
    report.compare = prepared.result
    try:
        comparison.run(prepared, _progress)
    finally:
        print(table(report.compare))
    if options.plot:
        plot(report.compare, options.plot)
    return not any(engine.error for engine in report.compare.engines)


def empty_cache(options: Options, report: Report) -> bool:
    from warmup.cache_files import show_or_empty

    return show_or_empty(options, report)


def convert(options: Options, report: Report) -> bool:
    from warmup.convert import convert_checkpoint

    model = _checked_model(options, report)
    assert model
    assert options.model
    assert options.out
    report.convert = done = convert_checkpoint(model, Path(options.model), options.out)
    print(
        f"{as_text(done.path)}: {done.quantized} of {done.tensors} tensors quantized, "
        f"{done.source_bytes / 1e9:.2f} GB became {done.bytes / 1e9:.2f} GB in {done.files} files"
    )
    return True


RUN = {
    "compile": compile_kernels,
    "list": list_kernels,
    "explain": explain,
    "verify": verify,
    "bundle": compile_kernels,
    "doctor": doctor,
    "bench": bench,
    "tune": tune,
    "compare": compare,
    "convert": convert,
    "cache": empty_cache,
}


def _checked_model(options: Options, report: Report) -> Model | None:
    """Returns the checkpoint's model, or None without --model. Raises `UnsupportedError` if it cannot be split so."""
    if options.model is None:
        return None
    model = read_checkpoint(options.model, report, options.revision, options.download_dir)
    check_split(model, options.parallel, report)
    return model


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _count(report: Report, state: State) -> int:
    return sum(kernel.state == state for kernel in report.kernels)
