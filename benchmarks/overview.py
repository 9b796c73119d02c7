"""Draw the plot of README.md, wide and for phones, and make its table, from the files in benchmarks/results.

python -m benchmarks.overview            # needs matplotlib, but neither torch nor a GPU
python -m benchmarks.overview --check    # exits with 1 if one of them is stale
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.tables import MARKED, OURS, ROOT, Row, best, checks_only, results, table, write

PLOTS = {ROOT / "docs" / "overview.svg": 4, ROOT / "docs" / "overview-narrow.svg": 1}  # panels beside each other
DOCUMENT = ROOT / "README.md"
LAYERS, ENGINES = "moe_layer-2026-11-22", "engine_e2e-qwen3-48-2026-11-26"
DEEPGEMM, REQUESTS = "engine_e2e-qwen3-2026-11-25", "bench_serve-qwen3-48-2026-11-27"
READY, PERPLEXITY = "serve_ready-2026-11-21", "perplexity-2026-11-22"
CACHES = {"cold": "empty", "warm": "filled"}
TICKS = (1, 8, 64, 256, 2048, 16384)
OUR_COLOUR, PEER_COLOUR = "#d1495b", "#7a8288"
Points = dict[int, tuple[float, float]]  # ours and the fastest peer's, by tokens or sequences


def layer() -> Points:
    """Microseconds of an MoE layer of DeepSeek-V3 split over 8 GPUs, by tokens."""
    rows: list[Row] = [row for row in results(LAYERS)["rows"] if row["shape"] == "dsv3-tp8"]
    steps = sorted({row["T"] for row in rows})
    return {tokens: best((row for row in rows if row["T"] == tokens), "peer", "us") for tokens in steps}


def decode() -> Points:
    """Milliseconds of a step of an engine, by sequences; the peer is vLLM's `fp8` as it starts by itself."""
    return {int(size): points for size, points in _cells("decode ").items()}


def prefill() -> Points:
    """Milliseconds of a step of an engine, by prompt tokens; the peer is that of `decode`."""
    return {math.prod(map(int, size.split("x"))): points for size, points in _cells("prefill ").items()}


def requests() -> Points:
    """Tokens per second and GPU, by requests at any time with prompts and answers of 1,024 tokens."""
    rows = [row for row in results(REQUESTS)["rows"] if row["traffic"] == "1k/1k"]
    tokens = {(row["concurrency"], row["engine"]): row["tokens_per_s_per_gpu"] for row in rows}
    return {count: (ours, tokens[count, "triton"]) for (count, engine), ours in tokens.items() if engine == OURS}


def _cells(kind: str, time: str = "ms") -> dict[str, tuple[float, float]]:
    rows = [row for row in results(ENGINES)["rows"] if row["cell"].startswith(kind)]
    cells = dict.fromkeys(row["cell"] for row in rows)
    return {
        cell.removeprefix(kind): best((row for row in rows if row["cell"] == cell), "engine", time) for cell in cells
    }


def deepgemm(kind: str) -> list[str]:
    """The time with DeepGEMM's experts over ours, in a run of fewer layers."""
    rows = [row for row in results(DEEPGEMM)["rows"] if row["cell"].startswith(kind)]
    times = {(row["cell"], row["engine"]): row["ms"] for row in rows}
    return [f"{times[cell, 'vllm-deepgemm'] / ms:.2f}" for (cell, engine), ms in times.items() if engine == OURS]


def glance() -> str:
    """The table of README.md: what is slower stands there as well."""
    ready, engines = results(READY), results(PERPLEXITY)["engines"].items()
    over = {name: run["against_bf16"]["percent"] for name, run in engines if run["against_bf16"]}
    busy = _cells("prefill ", "gpu_busy_ms").values()
    prefills = [
        (f"prefill of {tokens:,} tokens, ms", *map(_with_gpu, ms, on_gpu))
        for (tokens, ms), on_gpu in zip(prefill().items(), busy, strict=True)
    ]
    decodes = [(f"decode step of {_sequences(count)}, ms", *_rounded(ms, 2)) for count, ms in decode().items()]
    lines = [
        *((*cells, ratio) for cells, ratio in zip(prefills, deepgemm("prefill "), strict=True)),
        *((*cells, ratio) for cells, ratio in zip(decodes, deepgemm("decode "), strict=True)),
        *(
            (
                f"`vllm serve` of three layers of DeepSeek-V3 ready, caches {name}, s",
                *_rounded(_ready(ready, key), 0),
                "",
            )
            for key, name in CACHES.items()
        ),
        ("perplexity of a small model, over BF16", f"+{over.pop(OURS):.2f}%", f"+{min(over.values()):.2f}%", ""),
    ]
    return table(["", OURS, "vLLM's `fp8`", f"with DeepGEMM's experts, over `{OURS}`"], lines)


def _with_gpu(ms: float, on_gpu: float) -> str:
    """Milliseconds, with those of the GPU where most of the time it waits for the host."""
    return f"{ms:.1f}" + (f" (GPU {on_gpu:.1f})" if on_gpu < ms / 2 else "")


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count > 1)}"


def _ready(ready: Row, caches: str) -> tuple[float, float]:
    return ready[f"bundle {caches}"]["ready_s"], ready[f"fp8 {caches}"]["ready_s"]


def _rounded(values: Iterable[float], digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in values]


def digest() -> str:
    """Of the plotted figures and this file: a plot with another one is stale."""
    drawn = json.dumps([layer(), decode(), prefill(), requests()])
    return hashlib.sha256((drawn + Path(__file__).read_text()).encode()).hexdigest()


def plot(path: Path, across: int) -> None:
    """Draw the panels, `across` of them beside each other."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot nothing looks for a display

    title = "Block FP8 on one NVIDIA H200,\nvLLM " + results(ENGINES)["vllm"]
    fastest, default = "vLLM's fastest backend", "vLLM's default backend"
    triton = "vLLM, Triton's experts"
    rates = {tokens: (tokens / ours, tokens / peer) for tokens, (ours, peer) in prefill().items()}
    panels = [
        ("MoE layer of DeepSeek-V3, TP 8", "tokens", "microseconds per layer\n(lower is better)", fastest, layer()),
        ("Decode, Qwen3-30B-A3B", "sequences", "milliseconds per step\n(lower is better)", default, decode()),
        ("Prefill, Qwen3-30B-A3B", "prompt tokens", "thousand tokens per second\n(higher is better)", default, rates),
        ("1k/1k, Qwen3-30B-A3B", "requests at a time", "tokens per second\n(higher is better)", triton, requests()),
    ]
    down = len(panels) // across
    figure = Figure(figsize=(3.7 * across, 3.3 * down + 0.5), layout="constrained")
    figure.suptitle(title.replace("\n", " ") if across > 1 else title)
    for axes, panel in zip(figure.subplots(down, across).flat, panels, strict=True):
        _draw(axes, *panel)
    with rc_context({"svg.hashsalt": path.stem}):  # so that the same results give the same file
        figure.savefig(path, metadata={"Date": None, "Description": digest()})


def _draw(axes: Any, name: str, x: str, y: str, peer: str, points: Points) -> None:
    for index, (label, colour) in enumerate(((OURS, OUR_COLOUR), (peer, PEER_COLOUR))):
        values = [pair[index] for pair in points.values()]
        axes.plot(list(points), values, "o-", color=colour, label=label, markersize=4, zorder=3 - index)
    axes.set(title=name, xlabel=x, ylabel=y, xscale="log")
    if "micro" in y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.3 * max(max(pair) for pair in points.values()))  # above the lines is the legend
    ticks = [tick for tick in TICKS if min(points) <= tick <= max(points)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")


def rendered(document: str) -> str:
    """README.md with the table as the results have it."""
    return MARKED.sub(lambda marked: f"{marked[1]}\n{glance()}\n{marked[3]}", document)


def main() -> None:
    check = checks_only(__doc__)
    for path, across in PLOTS.items():
        if not check:
            plot(path, across)
        elif digest() not in path.read_text():
            sys.exit(f"{path} is stale: run python -m benchmarks.overview")
    write({DOCUMENT: rendered(DOCUMENT.read_text())}, check, "overview")


if __name__ == "__main__":
    main()
