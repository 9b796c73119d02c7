"""Reads a command's checkpoint from a folder, or from the hub, where only config.json is downloaded."""

import re
import stat
import sys
from pathlib import Path

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.splits import engine_text, rank_shapes
from fp8moe_plugin.checkpoint.unquantized import incomplete_text
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.quoting import shown
from warmup.hub import download_config
from warmup.report import ModelReport, Report

NOT_QUANTIZED = (
    "the checkpoint is not FP8: --quantization fp8moe quantizes it every time it is loaded; "
    "`fp8moe-warmup convert` does it once"
)
UNKNOWN = (
    "models of the type {} are not known to fp8moe-warmup: it reads their sizes under the names that other families "
    "use, so layers may be missing in its figures. The kernels do not depend on them"
)
UNKNOWN_FORMAT = (
    "config.json has no expert_dtype, and there are no weights to look into: the experts may be in MXFP4 or in block "
    "FP8. The kernels for both are included"
)
OF_OUR_KERNELS = ("bench", "tune", "convert")  # commands
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def read_checkpoint(
    source: str, report: Report, revision: str | None = None, download_dir: Path | None = None
) -> Model:
    """Read the model in a folder or on the hub, and describe it in the report.

    Args:
        source, revision, download_dir: see `checkpoint_folder`.
    Raises:
        CheckpointError, UnsupportedError: there is no such model, or it is not supported.
    """
    folder = checkpoint_folder(source, revision, download_dir)
    model = read_model(folder)
    experts = model.experts
    report.model = ModelReport(
        source=source,
        architecture=model.architecture,
        moe_layers=experts.layers,
        experts=experts.experts,
        topk=experts.topk,
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        ue8m0=model.ue8m0,
        quantized=model.quantized,
        remote_code=model.remote_code,
    )
    if not model.quantized and report.command != "convert":
        warn(report, NOT_QUANTIZED)
    if model.unknown_family:
        warn(report, UNKNOWN.format(model.unknown_family))
    if model.unknown_format:
        warn(report, UNKNOWN_FORMAT)
    if model.incomplete_names:
        warn(report, incomplete_text(model.incomplete_names))
    return model


def check_split(model: Model, parallel: Parallel, report: Report) -> None:
    """Warn of the layers that run on the engine's own kernels if a model is split this way.

    Raises:
        UnsupportedError: it cannot be split this way, or there are such layers and the command is about our kernels.
    """
    rank_shapes(model, parallel)
    if not (theirs := engine_text(model, parallel)):
        return
    if report.command in OF_OUR_KERNELS:
        raise UnsupportedError(f"{report.command} needs a model whose layers our kernels support, but {theirs}.")
    warn(report, theirs)


def warn(report: Report, text: str) -> None:
    report.warnings.append(text)
    print(f"warning: {text}", file=sys.stderr)


def is_folder(name: str) -> bool:
    """Returns whether there is a folder of this name. Raises `CheckpointError` if this cannot be determined."""
    try:
        return stat.S_ISDIR(Path(name).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError for a null character
        return False
    except OSError as error:
        raise CheckpointError(
            f"{shown(name)} cannot be opened: {error.strerror}. Check the name, and the permissions of the folders "
            "above it."
        ) from error


def checkpoint_folder(model: str, revision: str | None = None, download_dir: Path | None = None) -> Path:
    """Returns the folder that contains the checkpoint's config.json.

    Args:
        model: a folder, or the id of a model on the hub, whose config.json is downloaded.
        revision, download_dir: see `download_config`.
    Raises:
        CheckpointError: the folder is not accessible, or there is neither such a folder nor such a model on the hub.
    """
    if is_folder(model):
        return Path(model)
    if Path(model).is_file():
        raise CheckpointError(f"{shown(model)} is a file. Give the folder that contains the checkpoint's config.json.")
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{shown(model)} is neither a folder nor the id of a model on the hub (organisation/name). "
            "Check its spelling."
        )
    return download_config(model, revision, download_dir)
