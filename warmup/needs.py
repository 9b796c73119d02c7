"""What a model needs here besides this plugin: packages that compile kernels of vLLM's own, and memory."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.quoting import shell_word
from warmup.diagnosis import Diagnosis, Gpu
from warmup.options import Options
from warmup.report import Finding
from warmup.target import GPUS


class Need(NamedTuple):
    name: str
    module: str
    purpose: str
    nvcc: bool = False  # whether it compiles by nvcc


TILELANG = Need("TileLang", "tilelang", "hyper-connections", nvcc=True)
CUTLASS_DSL = Need("CUTLASS DSL (nvidia-cutlass-dsl)", "cutlass", "compressed keys")


def needs_of(model: Model) -> list[Need]:
    compresses = model.cache is not None and bool(model.cache.token_bytes)
    return [*([TILELANG] if model.streams > 1 else []), *([CUTLASS_DSL] if compresses else [])]


def note(model: Model) -> list[str]:
    """Returns a sentence about the packages that vLLM needs for a model, if there are any."""
    needs = needs_of(model)
    if not needs:
        return []
    listed = " and ".join(f"{need.name}{' with nvcc' if need.nvcc else ''} for {need.purpose}" for need in needs)
    return [f"Besides this plugin, vLLM needs {listed}."]


def findings(model: Model, facts: Diagnosis) -> Iterator[Finding]:
    """Check that the packages are installed, if vLLM and a GPU are here."""
    needs = needs_of(model)
    if not needs:
        return
    said = " ".join(note(model))
    serves = facts.gpus and any(engine.name == "vLLM" for engine in facts.engines)
    missing = [need.name for need in needs if importlib.util.find_spec(need.module) is None]
    missing += ["nvcc"] * (any(need.nvcc for need in needs) and not has_nvcc())
    if not serves:
        yield Finding(subject="packages", found=said)
    elif missing:
        found = f"{said} Missing: {', '.join(missing)}"
        yield Finding(subject="packages", found=found, ok=False, advice="Run `pip check`, and install what vLLM lacks.")
    else:
        yield Finding(subject="packages", found=said, ok=True)


def memory_findings(model: Model, options: Options, gpus: list[Gpu]) -> Iterator[Finding]:
    """Refuse a split whose weights are larger than a GPU."""
    from warmup.memory import weight_bytes

    smallest, weights = min(gpus, key=lambda gpu: gpu.memory_bytes), weight_bytes(model, options.parallel)
    if weights < smallest.memory_bytes:
        return
    kind = next((kind for kind in GPUS if kind in smallest.name.lower()), None)
    found = f"{options.parallel} gives a GPU {weights / 1e9:.1f} GB of weights, but GPU {smallest.ordinal} has only "
    found += f"{smallest.memory_bytes / 1e9:.1f} GB"
    command = f"fp8moe-warmup explain --model {shell_word(options.model or '')} --gpu {kind}"
    advice = f"Run `{command}`: it shows the splits that fit." if kind else None
    yield Finding(subject="memory", found=found, ok=None if model.unknown_family else False, advice=advice)


def has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return bool(shutil.which("nvcc")) or (Path(home) / "bin" / "nvcc").is_file()
