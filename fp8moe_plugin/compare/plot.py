"""The result of `fp8moe-warmup compare` as a plot. Needs matplotlib."""

from pathlib import Path
from typing import Any

from fp8moe_plugin.bench.result import OURS, check_plot
from fp8moe_plugin.compare.result import CompareResult
from fp8moe_plugin.quoting import shown_text

COLOURS = ("tab:orange", "0.45", "0.7")  # only ours has a colour


def plot(result: CompareResult, path: Path) -> None:
    """Draw tokens per second, time to first token, divergence and time to ready, as PNG or SVG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    check_plot()
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # unlike pyplot, it does not need a display

    peers = [engine.name for engine in result.engines if engine.name != OURS]
    colours = dict(zip([OURS, *peers], COLOURS, strict=False))
    figure = Figure(figsize=(10, 7), layout="constrained")
    rates, first, apart, ready = figure.subplots(2, 2).flat
    _rates(rates, result, colours)
    times = {e.name: e.first_token_ms.value for e in result.engines if e.first_token_ms}
    _bars(first, f"Time to first token, ms\n(prompt of {result.prompt_tokens:,} tokens)", times, colours)
    _divergence(apart, result, colours)
    seconds = {engine.name: engine.ready_s for engine in result.engines if engine.ready_s is not None}
    _bars(ready, "Time to ready, s" + "\n(started together)" * bool(result.in_turns), seconds, colours)
    figure.suptitle(_title(result))
    with rc_context({"svg.hashsalt": "compare"}):  # so that the same result gives the same file
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _title(result: CompareResult) -> str:
    if result.model is None:
        return ", ".join(f"{engine.name} {shown_text(engine.url)}" for engine in result.engines)
    name = shown_text(result.model.rstrip("/").rpartition("/")[2])
    return f"{name}, vLLM {result.vllm}, {result.gpu or 'CPU: times say nothing about a GPU'}"


def _rates(axes: Any, result: CompareResult, colours: dict[str, str]) -> None:
    counts = sorted({count for engine in result.engines for count in engine.tokens_per_s})
    for engine in result.engines:
        points = sorted((count, found.value) for count, found in engine.tokens_per_s.items())
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colours[engine.name], label=engine.name)
    axes.set(xscale="log", yscale="log", xlabel="sequences decoded at once", title="Tokens per second")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    if counts:
        axes.legend()


def _divergence(axes: Any, result: CompareResult, colours: dict[str, str]) -> None:
    """Draw bars with the 95% intervals as error bars."""
    found = {engine.name: engine.divergence for engine in result.engines if engine.divergence}
    if not found:
        axes.set_axis_off()
        return
    title = f"KL divergence from {result.reference}, nats per token\n(on the text; lines: 95% intervals)"
    bars = _bars(axes, title, {name: interval.value for name, interval in found.items()}, colours, "center")
    for bar, interval in zip(bars, found.values(), strict=True):
        axes.vlines(bar.get_x() + bar.get_width() / 2, interval.low, interval.high, color="k")


def _bars(axes: Any, title: str, values: dict[str, float], colours: dict[str, str], where: str = "edge") -> Any:
    bars = axes.bar(list(values), list(values.values()), width=0.6, color=[colours[name] for name in values])
    axes.bar_label(bars, [f"{value:#.3g}".rstrip(".") for value in values.values()], label_type=where, padding=2)
    axes.set_title(title)
    axes.set_xlim(-0.6, max(len(values), 2) - 0.4)
    axes.margins(y=0.15)
    return bars
