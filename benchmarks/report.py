"""Results files: when and on what a measurement was taken, then its figures, one line per measured point."""

import datetime
import functools
import hashlib
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

import fp8moe_plugin
from benchmarks import kernels
from warmup.report import installed as installed  # for the results of benchmarks, too

Backend = TypeVar("Backend")


def results_or_errors(
    backends: dict[str, Backend], measure: Callable[[Backend], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns the result of `measure` for each backend, by name; a backend that fails has its `error` instead."""
    results: dict[str, dict[str, Any]] = {}
    for name, backend in backends.items():
        try:
            results[name] = measure(backend)
        except Exception as failure:  # noqa: BLE001 (a peer may be absent or fail in any way; the others count)
            results[name] = {"error": textwrap.shorten(f"{type(failure).__name__}: {failure}", 300)}
    return results


@functools.cache
def sources_sha256() -> str:
    """Returns the hash of the package's sources, which identifies the code that was measured."""
    package = Path(fp8moe_plugin.__file__).parent
    files = sorted(p for p in package.rglob("*") if p.suffix in (".py", ".cu", ".cuh"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


def write_report(path: Path, results: dict[str, Any]) -> None:
    """Write results, which may replace what is said here about the measurement."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "sources_sha256": sources_sha256(),
        "kernel_hashes": kernels.hashes(),
    }
    path.write_text(report_text(about | results))


def report_text(report: dict[str, Any]) -> str:
    """JSON with each measured point on a line of its own, however long, so that a diff shows which points changed."""
    return _expanded(report, indent=0) + "\n"


def _text(value: Any, indent: int) -> str:
    if isinstance(value, dict) and not _is_point(value):
        return _expanded(value, indent)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _block("[]", [json.dumps(item) for item in value], indent)
    return json.dumps(value)


def _expanded(value: dict[str, Any], indent: int) -> str:
    items = [f"{json.dumps(key)}: {_text(item, indent + 1)}" for key, item in value.items()]
    return _block("{}", items, indent)


def _block(brackets: str, items: list[str], indent: int) -> str:
    inner = ",\n".join(" " * (indent + 1) + item for item in items)
    return f"{brackets[0]}\n{inner}\n{' ' * indent}{brackets[1]}"


def _is_point(value: dict[str, Any]) -> bool:
    """Returns whether this holds figures, rather than points by name."""
    nested = [item for item in value.values() if isinstance(item, dict)]
    deeper = any(isinstance(inner, dict) for item in nested for inner in item.values())
    rows = any(isinstance(inner, dict) for item in value.values() if isinstance(item, list) for inner in item)
    return not deeper and not rows and len(nested) < max(len(value), 1)
