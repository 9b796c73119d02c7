"""The file of a measurement: when it was taken and on what, then what was seen."""

import datetime
import json
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

Backend = TypeVar("Backend")


def results_or_errors(
    backends: dict[str, Backend], measure: Callable[[Backend], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What `measure` says of each backend, by its name, or its `error`."""
    results: dict[str, dict[str, Any]] = {}
    for name, backend in backends.items():
        try:
            results[name] = measure(backend)
        except Exception as failure:  # noqa: BLE001 (a peer may be absent or fail in any way; the others count)
            results[name] = {"error": textwrap.shorten(f"{type(failure).__name__}: {failure}", 300)}
    return results


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write_report(path: Path, results: dict[str, Any]) -> None:
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }
    path.write_text(json.dumps(about | results, indent=1) + "\n")
