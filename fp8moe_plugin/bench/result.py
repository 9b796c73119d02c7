"""The result of `fp8moe-warmup bench`, as a table and as a plot. Needs neither torch nor vLLM."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from fp8moe_plugin import terminal
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.errors import UnsupportedError

T = TypeVar("T")

OURS = "fp8moe"


class BenchRow(BaseModel):
    """One backend at one number of tokens: either `error`, or all of `us`, `relative_l2` and `first_call_s`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str
    tokens: int  # tokens that reach this rank
    floor_us: float  # a lower bound for any kernel on an H200
    us: float | None = None  # microseconds of one layer, the median of CUDA graph replays
    relative_l2: float | None = None  # distance of the first tokens' results from float32 math
    first_call_s: float | None = None  # seconds of the first call, which may include compilation
    error: str | None = None  # one line: why there is no time


class BenchResult(BaseModel):
    """One layer on one machine, with every backend at every number of tokens.

    `shape` is the layer on one rank; `rank_layer` explains its `topk` under expert parallelism.
    `ue8m0` says how our layer rounds activation scales; the peers follow vLLM's setting.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    date: str  # UTC, ISO 8601
    gpu: str
    driver: str
    torch: str
    vllm: str
    shape: Experts
    ue8m0: bool
    rows: list[BenchRow]


def table(result: BenchResult) -> str:
    """Returns a table of microseconds by tokens and backend, then the errors of backends."""
    names = _unique(row.backend for row in result.rows)
    header = ["tokens", *names, "floor", f"best peer / {OURS}", "error"]
    counts = _unique(row.tokens for row in result.rows)
    lines = [header, *([str(tokens), *_cells(result, tokens, names)] for tokens in counts)]
    machine = f"{result.gpu}, driver {result.driver}, torch {result.torch}, vLLM {result.vllm}, {result.date}"
    units = f"Microseconds of one layer; error: {OURS}'s relative L2 distance from float32 math."
    return "\n".join(
        [_title(result.shape), machine, units, "", terminal.table(">" * len(header), lines), *_failures(result, names)]
    )


def check_plot() -> None:
    """Raise `UnsupportedError` unless `plot` can draw; called before minutes of measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("A plot needs matplotlib, which is not installed here. Run: pip install matplotlib")


def plot(result: BenchResult, path: Path) -> None:
    """Plot microseconds over tokens, with a line per backend and a dashed one for the floor, as PNG or SVG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    check_plot()
    from matplotlib.figure import Figure  # unlike pyplot, it does not need a display

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds of one layer")
    for name in _unique(row.backend for row in result.rows):
        points = [(row.tokens, row.us) for row in result.rows if row.backend == name and row.us is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == OURS else 1.5)
    floors = {row.tokens: row.floor_us for row in result.rows}
    axes.plot(list(floors), list(floors.values()), "k--", label="floor")
    axes.set_xticks(list(floors), [str(tokens) for tokens in floors])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{_title(result.shape)}\n{result.gpu}, vLLM {result.vllm}")
    figure.savefig(path, dpi=150)


def _title(shape: Experts) -> str:
    return (
        f"MoE layer of one rank: {shape.experts} experts, {shape.topk} per token, "
        f"hidden {shape.hidden}, intermediate {shape.intermediate}"
    )


def _cells(result: BenchResult, tokens: int, names: list[str]) -> list[str]:
    here = {row.backend: row for row in result.rows if row.tokens == tokens}
    times = {name: here[name].us for name in names if name in here}
    ours, error = times.get(OURS), here[OURS].relative_l2 if OURS in here else None
    peers = [us for name, us in times.items() if name != OURS and us is not None]
    ratio = min(peers) / ours if peers and ours else None
    floor = next(iter(here.values())).floor_us
    microseconds = [_number(times.get(name), 1) for name in names]
    return [*microseconds, _number(floor, 1), _number(ratio, 2), _number(error, 4)]


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _failures(result: BenchResult, names: list[str]) -> list[str]:
    lines = []
    for name in names:
        rows = [row for row in result.rows if row.backend == name]
        for error in _unique(row.error for row in rows if row.error):
            failed = [str(row.tokens) for row in rows if row.error == error]
            where = "" if len(failed) == len(rows) else f" at {', '.join(failed)} tokens"
            lines.append(terminal.fit(f"{name}{where}: {error}", indent=2))
    return ["", *lines] if lines else []


def _unique(values: Iterable[T]) -> list[T]:
    """Returns the distinct values in order of first appearance."""
    return list(dict.fromkeys(values))
