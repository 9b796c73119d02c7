"""What was asked for, as text on standard output and as a report for `--json`."""

import hashlib
import io
import os
import shlex
import sys
import time
from pathlib import Path

from fp8moe_plugin.errors import Fp8MoeError
from fp8moe_plugin.jit import cache, lookup
from fp8moe_plugin.shapes import Model, rank_shapes
from warmup import kernels
from warmup.model import read_checkpoint, warn
from warmup.options import Options, parse
from warmup.report import BundleReport, Report, State

GOOD = (State.PRESENT, State.COMPILED)


def run(arguments: list[str] | None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    report = Report(command=options.command, parallel=str(options.parallel))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    done = False
    try:
        done = RUN[options.command](options, report)
        sys.stdout.flush()
    except Fp8MoeError as error:
        report.error = str(error)
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        report.error = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}. Check the disk."
    except KeyboardInterrupt:
        report.error = "Interrupted. What is done is kept; run the command again to go on."
    if options.json:
        try:
            report.write(options.json)
        except OSError as error:
            report.error, done = f"{options.json} cannot be written: {error.strerror}. Choose another file.", False
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    return 0 if done else 1


def compile_kernels(options: Options, report: Report) -> bool:
    plan = kernels.plan_of(_checked_model(options, report))
    start = time.perf_counter()
    report.kernels = kernels.compile_missing(plan)
    report.seconds = round(time.perf_counter() - start, 3)
    for kernel in report.kernels:
        if kernel.detail and kernel.state in (State.COMPILED, State.FAILED):
            warn(report, f"{kernel.kernel}: {kernel.detail}")
    counts = ", ".join(f"{_count(report, state)} {state}" for state in (*GOOD, State.FAILED))
    print(f"{len(plan)} kernels: {counts}, in {report.seconds:.1f} s; cache {cache.cache_dir()}")
    good = all(kernel.state in GOOD for kernel in report.kernels)
    if good and options.bundle:
        _write_bundle(options, report, plan)
    return good


def _write_bundle(options: Options, report: Report, plan: kernels.Plan) -> None:
    assert options.bundle
    path, content = options.bundle.absolute(), kernels.write_bundle(options.bundle.absolute(), plan)
    digest = hashlib.sha256(content).hexdigest()
    report.bundle = BundleReport(path=str(path), sha256=digest, size=len(content), kernels=len(plan))
    print(f"{path}: {len(plan)} kernels, {len(content) / 1e6:.2f} MB, sha256 {digest}")
    print(f"Serve with FP8MOE_BUNDLE={shlex.quote(str(path))}, and FP8MOE_JIT=forbid to be sure that nothing compiles.")


def list_kernels(options: Options, report: Report) -> bool:
    report.kernels = kernels.look_up(kernels.plan_of(_checked_model(options, report)))
    print(kernels.table(report.kernels))
    print(_summary(report))
    return True


def verify(options: Options, report: Report) -> bool:
    """With a bundle, the bundle alone: whoever serves from it may have nothing else."""
    plan = kernels.plan_of(_checked_model(options, report))
    bundle = options.bundle or lookup.bundle_path()
    report.kernels = kernels.look_into(bundle, plan) if bundle else kernels.look_up(plan)
    bad = [kernel for kernel in report.kernels if kernel.state != State.PRESENT]
    for kernel in bad:
        print(f"{kernel.state} {kernel.kernel}: {kernel.detail}")
    print(_summary(report))
    if bad:
        model = f" --model {shlex.quote(options.model)} {options.parallel}" if options.model else ""
        print(f"Run `{lookup.warmup_command(lookup.WARMUP + model, bundle)}`.")
    return not bad


def _summary(report: Report) -> str:
    places = ", ".join(sorted({kernel.place for kernel in report.kernels if kernel.place}))
    where = f", in {places}" if places else ""
    return f"{len(report.kernels)} kernels, {_count(report, State.PRESENT)} present and whole{where}"


def explain(options: Options, report: Report) -> bool:
    from warmup import explain as explanation

    model = _checked_model(options, report)
    assert model
    report.explain = explanation.explain(model, options.parallel, options.max_tokens, options.capture_sizes)
    print(explanation.text(model, report.explain, options.max_tokens))
    return True


def doctor(options: Options, report: Report) -> bool:
    from warmup import doctor as examination

    report.doctor = examination.findings(options, report)
    print(examination.text(report.doctor))
    return all(finding.ok is not False for finding in report.doctor)


def bench(options: Options, report: Report) -> bool:
    from warmup import bench as benchmark
    from warmup.bench_result import check_plot, plot, table

    model = _checked_model(options, report)
    assert model
    if options.plot:
        check_plot(options.plot)
    layer = benchmark.rank_layer(model, options.parallel)
    report.bench = benchmark.bench_layer(layer, options.tokens or benchmark.TOKENS, model.ue8m0, _progress)
    print(table(report.bench))
    if options.plot:
        plot(report.bench, options.plot)
    return True


def convert(options: Options, report: Report) -> bool:
    from warmup.convert import convert_checkpoint

    model = _checked_model(options, report)
    assert model
    assert options.model
    assert options.out
    report.convert = done = convert_checkpoint(model, Path(options.model), options.out)
    print(
        f"{done.path}: {done.quantized} of {done.tensors} tensors quantized, {done.source_bytes / 1e9:.2f} GB became "
        f"{done.bytes / 1e9:.2f} GB in {done.files} files"
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
    "convert": convert,
}


def _checked_model(options: Options, report: Report) -> Model | None:
    """The checkpoint, if one is named and the ranks can share it."""
    if options.model is None:
        return None
    model = read_checkpoint(options.model, report)
    rank_shapes(model, options.parallel)
    return model


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _count(report: Report, state: State) -> int:
    return sum(kernel.state == state for kernel in report.kernels)
