"""Tables and plots of the results of `benchmarks.engine.engine_e2e`."""

import json
from pathlib import Path
from typing import Any

from fp8moe_plugin.bench.result import OURS, check_plot
from fp8moe_plugin.errors import UnsupportedError


def best_peer_over_ours(rows: list[dict[str, Any]]) -> float | None:
    """Returns the ratio of one cell's rows, if ours and a peer finished."""
    ms = {row["engine"]: row["ms"] for row in rows}
    ours = ms.pop(OURS, None)
    return min(ms.values()) / ours if ours and ms else None


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds (least), and the GPU's and the host's if known, by cell and engine; the ratio comes last."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))

    def text(row: dict[str, Any] | None) -> str:
        if row is None:
            return "-"
        known = [row[key] for key in ("gpu_busy_ms", "host_ops_ms") if row[key] is not None]
        return " ".join([f"{row['ms']:.2f} ({row['ms_least']:.2f})", *(f"{ms:.2f}" for ms in known)])

    lines = [["ms (least) GPU host", *engines, f"best peer / {OURS}"]]
    for cell in dict.fromkeys((row["model"], row["cell"]) for row in rows):
        of_cell = {row["engine"]: row for row in rows if (row["model"], row["cell"]) == cell}
        ratio = best_peer_over_ours(list(of_cell.values()))
        cells = [text(of_cell.get(engine)) for engine in engines]
        lines.append([" ".join(cell), *cells, f"{ratio:.2f}" if ratio else "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in lines)


def read_report(path: Path) -> dict[str, Any]:
    """Read an earlier report.

    Raises:
        UnsupportedError: this is not a report of this benchmark, or it has no rows.
    """
    try:
        results: dict[str, Any] = json.loads(path.read_text())
        rows = [(row["model"], row["cell"], row["engine"], row["ms"]) for row in results["rows"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedError(f"{path} is not a report of engine_e2e: {error!r}.") from None
    if not rows:
        raise UnsupportedError(f"{path} has no rows.")
    return results


def plot(report: Path) -> None:
    """Plot each peer's time over ours by cell, one panel per model, to an .svg next to the report."""
    check_plot()
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot nothing looks for a display

    results = read_report(report)
    models = list(dict.fromkeys(row["model"] for row in results["rows"]))
    figure = Figure(figsize=(8, 4 * len(models)), layout="constrained")
    for axes, model in zip(figure.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
        ms = {(row["engine"], row["cell"]): row["ms"] for row in results["rows"] if row["model"] == model}
        cells = [cell for engine, cell in ms if engine == OURS]
        axes.set_xticks(range(len(cells)), cells, rotation=30, ha="right")
        axes.axhline(1, color="k", lw=1)
        for number, name in enumerate(dict.fromkeys(name for name, _ in ms if name != OURS)):
            points = [(x, ms[name, cell] / ms[OURS, cell]) for x, cell in enumerate(cells) if (name, cell) in ms]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=name)
        axes.set_ylabel(f"time over {OURS}'s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        axes.set_title(f"{model}, vLLM {results['vllm']}, {results['gpu']}")
    with rc_context({"svg.hashsalt": report.stem}):  # so that the same report gives the same file
        figure.savefig(report.with_suffix(".svg"), metadata={"Date": None})
