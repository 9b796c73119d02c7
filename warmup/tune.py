"""`tune`: measures the thresholds of the plans on this GPU, and writes them to a file for FP8MOE_TUNING."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.jit.atomic import write_output
from fp8moe_plugin.launches.tuning_file import (
    TuningFile,
    has_no_thresholds,
    made_for,
    plugin_version,
    read_tuning,
    tuning_path,
    tuning_text,
)
from fp8moe_plugin.plan.gpu_tuning import default_tuning
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.quoting import shell_word, shown_text
from fp8moe_plugin.terminal import table
from warmup.diagnosis import Diagnosis
from warmup.failures import as_text
from warmup.options import Options
from warmup.report import Finding


def measure(options: Options, model: Model | None, report_progress: Callable[[str], None]) -> TuningFile:
    """Returns the thresholds for this GPU and a model, or some standard layers.

    Raises:
        UnsupportedError: there is no Hopper GPU.
    """
    from fp8moe_plugin.bench import tune

    clock = tune.GpuClock(_specs(options, model) if model else tune.LAYERS)
    default = default_tuning(clock.gpu)
    tuning, steps, changed = tune.tune(clock.specs, clock.multiprocessors, default, clock, report_progress)
    return TuningFile(gpu=clock.gpu, version=plugin_version(), tuning=tuning, steps=steps, changed=changed)


def _specs(options: Options, model: Model) -> dict[str, LayerSpec]:
    """Returns the most frequent layer of a model on one rank, without biases."""
    from fp8moe_plugin.bench.layer import rank_layer

    experts = rank_layer(model, options.parallel)
    spec, *_ = model_specs(model, MoeShape.of(experts, experts.experts))
    return {f"{model.architecture} {options.parallel}": spec._replace(bias=False)}


def text(file: TuningFile) -> str:
    """Returns the thresholds and the steps that they change."""
    defaults = asdict(default_tuning(file.gpu))
    found = [
        (name, f"{value} ({'the default' if value == defaults[name] else f'default {defaults[name]}'})")
        for name, value in asdict(file.tuning).items()
    ]
    header = f"{file.gpu}, version {file.version} of the plugin; microseconds of one layer"
    lines = [header, "", table("<<", found), ""]
    lines += [f"{len(file.changed)} of {file.steps} measured steps have another plan than by default"]
    if file.changed:
        rows = [("layer", "tokens", "default", "tuned", "tuned / default")]
        rows += [
            (s.layer, str(s.tokens), f"{s.default_us:.1f}", f"{s.us:.1f}", f"{s.us / s.default_us:.3f}")
            for s in file.changed
        ]
        lines += [table("<>>>>", rows)]
    return "\n".join(lines)


def write(file: TuningFile, path: Path) -> None:
    """Write the file, and print how to serve with it. Raises `UnsupportedError` if it cannot be written."""
    path = path.absolute()
    try:
        write_output(path, f"{file.model_dump_json(indent=1)}\n".encode())
    except OSError as error:
        raise UnsupportedError(f"{as_text(path)} cannot be written: {error.strerror}. Choose another file.") from error
    print(f"Serve with FP8MOE_TUNING={shell_word(str(path))}, on every rank.")


def findings(facts: Diagnosis) -> Iterator[Finding]:
    """Say for each kind of GPU that is served here whether FP8MOE_TUNING is used. Raises like `read_tuning`."""
    path = tuning_path()
    if path is None:
        return
    if not facts.gpus:
        yield Finding(subject="tuning", found=f"{shown_text(path)} is for {made_for(path)}; there is no GPU here")
    for name in dict.fromkeys(gpu.name for gpu in facts.gpus if gpu.served and gpu.backend == "triton"):
        yield Finding(subject="tuning", found=has_no_thresholds(name))
    for name in dict.fromkeys(gpu.name for gpu in facts.gpus if gpu.served and gpu.backend == "sm90"):
        found, file = read_tuning(path, name), shown_text(path)
        if isinstance(found, str):
            advice = f"Run `fp8moe-warmup tune --out {shell_word(str(path))}` on this GPU."
            yield Finding(subject="tuning", found=f"{file} is not used: {found}", advice=advice)
        else:
            yield Finding(subject="tuning", found=f"{file}: {tuning_text(found)}", ok=True)
