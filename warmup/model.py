"""The checkpoint that a command is about: a folder, or a model on the hub, of which only config.json is fetched."""

import re
import stat
import sys
from pathlib import Path

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.untrusted import shown
from fp8moe_plugin.errors import CheckpointError
from warmup.report import ModelReport, Report

NOT_QUANTIZED = (
    "the checkpoint is not FP8: --quantization fp8moe quantizes it whenever it is loaded; "
    "`python -m warmup convert` does so once"
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def read_checkpoint(source: str, report: Report) -> Model:
    """The model in a folder or on the hub, which the report then describes.

    Raises:
        CheckpointError, UnsupportedError: there is none, or none that can be served.
    """
    model = read_model(checkpoint_folder(source))
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
    )
    if not model.quantized and report.command != "convert":
        warn(report, NOT_QUANTIZED)
    return model


def warn(report: Report, text: str) -> None:
    report.warnings.append(text)
    print(f"warning: {text}", file=sys.stderr)


def is_folder(name: str) -> bool:
    """Whether there is a folder of this name; raise `CheckpointError` if that cannot be known."""
    try:
        return stat.S_ISDIR(Path(name).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a null character
        return False
    except OSError as error:
        raise CheckpointError(
            f"{shown(name)} cannot be opened: {error.strerror}. Check the name, and the permissions of the folders "
            "above it."
        ) from error


def checkpoint_folder(model: str) -> Path:
    """The folder that holds the checkpoint's config.json.

    Args:
        model: a folder, or the id of a model on the hub, whose config.json goes into huggingface_hub's cache.
    Raises:
        CheckpointError: there is no such folder, and no such model or no way to the hub; or the folder is out of reach.
    """
    if is_folder(model):
        return Path(model)
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{shown(model)} is neither a folder nor the id of a model on the hub (organisation/name). "
            "Check its spelling."
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json")).parent
    except Exception as error:  # its own errors, and those of whichever HTTP library it uses
        reason = "; ".join(f"{type(e).__name__}: {str(e).strip()[:300]}" for e in (error, error.__cause__) if e)
        raise CheckpointError(
            f"There is no folder {shown(model)} here, and the hub does not give a model of this name: {reason}. "
            "Check the name, HF_TOKEN and the network, or give the folder of a downloaded checkpoint."
        ) from error
