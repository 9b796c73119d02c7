"""Packages that vLLM needs for a model besides this plugin: they compile kernels of vLLM's own."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fp8moe_plugin.checkpoint.shapes import Model
from warmup.diagnosis import Diagnosis
from warmup.report import Finding


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


def has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return bool(shutil.which("nvcc")) or (Path(home) / "bin" / "nvcc").is_file()
