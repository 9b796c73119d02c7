"""The file of `fp8moe-warmup tune`, which FP8MOE_TUNING names: the tuning of a kind of GPU, and what it gained."""

import logging
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.gpu_tuning import GpuTuning, default_tuning
from fp8moe_plugin.quoting import shown_text
from fp8moe_plugin.settings import settings

Kind = TypeVar("Kind", bound=BaseModel)


class MadeFor(BaseModel):
    """What the file of any version has: the GPU and the version that it is for."""

    gpu: str  # name
    version: str  # of the plugin

    def __str__(self) -> str:
        return f"{shown_text(self.gpu)} and version {shown_text(self.version)} of the plugin"


class TunedStep(BaseModel):
    """A measured step whose plan the tuning changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: str
    tokens: int
    default_us: float  # microseconds of one layer without the tuning
    us: float


class TuningFile(MadeFor):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tuning: GpuTuning
    steps: int  # that were measured
    changed: list[TunedStep]


def plugin_version() -> str:
    return metadata.version("fp8moe-plugin")


def tuning_path() -> Path | None:
    path = settings().tuning
    return Path(os.path.expanduser(path)) if path else None  # noqa: PTH111  (Path.expanduser raises without a home)


def has_no_thresholds(gpu: str) -> str:
    """Returns that the file has no effect on a GPU of this name, which Triton kernels serve."""
    return f"FP8MOE_TUNING has no effect on {shown_text(gpu)}, which Triton kernels serve: it is for CUDA kernels"


def tuning_of(gpu: str) -> GpuTuning:
    """Returns the tuning of the CUDA kernels on a GPU of this name: that of FP8MOE_TUNING, or the defaults.

    The defaults, with a warning in the log, also apply if the file is for another GPU or version. A deployment may
    update the plugin before its settings, and another version's kernels were measured.

    Raises:
        UnsupportedError: see `read_tuning`.
    """
    path = tuning_path()
    if path is None:
        return default_tuning(gpu)
    found, named = read_tuning(path, gpu), f"FP8MOE_TUNING={shown_text(path)}"
    if isinstance(found, str):
        log_once(logging.WARNING, f"{named} is not used: {found}. Run `fp8moe-warmup tune` on this GPU")
        return default_tuning(gpu)
    log_once(logging.INFO, f"{named}: {tuning_text(found)}")
    return found.tuning


def read_tuning(path: Path, gpu: str) -> TuningFile | str:
    """Returns the content of a tuning file, or why it is not for a GPU of this name and this version of the plugin.

    Raises:
        UnsupportedError: it cannot be read, or `fp8moe-warmup tune` of this version did not write it.
    """
    content, version = _content(path), plugin_version()
    file = _parsed(MadeFor, content, path)
    if (file.gpu, file.version) != (gpu, version):
        return f"it is for {file}, and this is {shown_text(gpu)} and {version}"
    return _parsed(TuningFile, content, path)


def made_for(path: Path) -> MadeFor:
    """Returns the GPU and the version that a tuning file is for. Raises `UnsupportedError`, see `read_tuning`."""
    return _parsed(MadeFor, _content(path), path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnsupportedError(
            f"FP8MOE_TUNING is {shown_text(path)}, which cannot be read: {error.strerror}. Correct or unset it."
        ) from error


def _parsed(kind: type[Kind], content: bytes, path: Path) -> Kind:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise UnsupportedError(
            f"FP8MOE_TUNING is {shown_text(path)}, which `fp8moe-warmup tune` did not write: "
            f"{shown_text(where + first['msg'])}. Write it again, or unset the variable."
        ) from error


def tuning_text(file: TuningFile) -> str:
    """Returns the values of a file in one line, with the defaults of those that differ."""
    defaults = asdict(default_tuning(file.gpu))
    return ", ".join(
        f"{name} {value}" + (f" (default {defaults[name]})" if value != defaults[name] else "")
        for name, value in asdict(file.tuning).items()
    )
