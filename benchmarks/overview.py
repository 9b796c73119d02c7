"""Draw docs/overview.svg, the plot of README.md, and make README.md's table, from the files in benchmarks/results.

python -m benchmarks.overview            # needs matplotlib, but neither torch nor a GPU
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.tables import MARKED, OURS, ROOT, Row, best, results, table

PLOT = ROOT / "docs" / "overview.svg"
DOCUMENT = ROOT / "README.md"
LAYERS, DECODE, PREFILL = "moe_layer-2026-11-22", "engine_decode-2026-11-23", "engine_prefill-2026-11-21"
ENGINES, READY, PERPLEXITY = "engine_e2e-2026-11-24", "serve_ready-2026-11-21", "perplexity-2026-11-22"
CACHES = ("cold", "warm")
TICKS = (1, 8, 64, 256, 2048, 16384)
OUR_COLOUR, PEER_COLOUR = "#d1495b", "#7a8288"
Points = dict[int, tuple[float, float]]  # ours and the fastest peer's, by tokens or sequences


def layer() -> Points:
    """Microseconds of an MoE layer of DeepSeek-V3 split over 8 GPUs, by tokens."""
    rows: list[Row] = [row for row in results(LAYERS)["rows"] if row["shape"] == "dsv3-tp8"]
    steps = sorted({row["T"] for row in rows})
    return {tokens: best((row for row in rows if row["T"] == tokens), "peer", "us") for tokens in steps}


def decode() -> Points:
    """Milliseconds of a step of an engine, by sequences."""
    engines = results(DECODE)["engines"]
    steps = {name: {int(batch): row["ms"] for batch, row in run["batches"].items()} for name, run in engines.items()}
    ours = steps.pop(OURS)
    return {batch: (ms, min(peer[batch] for peer in steps.values())) for batch, ms in ours.items()}


def prefill() -> Points:
    """Thousand prompt tokens per second, by prompt tokens; the peer is vLLM's `fp8` as it starts by itself."""
    rows = [row for row in results(ENGINES)["rows"] if row["model"] == "dsv3" and row["cell"].startswith("prefill")]
    points = {}
    for cell in dict.fromkeys(row["cell"] for row in rows):
        prompts, _, tokens = cell.removeprefix("prefill ").partition("x")
        count = int(prompts) * int(tokens)
        ours, peer = best((row for row in rows if row["cell"] == cell), "engine", "ms")
        points[count] = count / ours, count / peer
    return points


def glance() -> str:
    """The table of README.md: what is slower stands there as well."""
    rates = {name: run["tokens_per_s"] for name, run in results(PREFILL)["engines"].items()}
    ready, engines = results(READY), results(PERPLEXITY)["engines"].items()
    over = {name: run["against_bf16"]["percent"] for name, run in engines if run["against_bf16"]}
    steps, seconds = zip(*decode().values(), strict=True), zip(*map(_ready, (ready, ready), CACHES), strict=True)
    lines = [
        ("prefill, prompt tokens per second", f"{rates.pop(OURS):,.0f}", f"{max(rates.values()):,.0f}"),
        (f"decode step with {' / '.join(map(str, decode()))} sequences, ms", *(_joined(ms, 2) for ms in steps)),
        ("seconds until `vllm serve` is ready, caches empty / filled", *(_joined(s, 0) for s in seconds)),
        ("perplexity of a small trained model, over BF16", f"+{over.pop(OURS):.2f}%", f"+{min(over.values()):.2f}%"),
    ]
    return table(["", OURS, "vLLM's fastest backend"], lines)


def _ready(ready: Row, caches: str) -> tuple[float, float]:
    return ready[f"bundle {caches}"]["ready_s"], ready[f"fp8 {caches}"]["ready_s"]


def _joined(values: Iterable[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def digest() -> str:
    """Of the plotted figures and this file: a plot with another one is stale."""
    drawn = json.dumps([layer(), decode(), prefill()])
    return hashlib.sha256((drawn + Path(__file__).read_text()).encode()).hexdigest()


def plot(path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot nothing looks for a display

    title = "DeepSeek-V3's shapes in block FP8 on one NVIDIA H200, vLLM " + results(ENGINES)["vllm"]
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    figure.suptitle(title)
    fastest, default = "vLLM's fastest backend", "vLLM's default backend"
    panels = [
        ("MoE layer, tensor parallel 8", "tokens", "microseconds per layer (lower is better)", fastest, layer()),
        ("Decode, 3 layers", "sequences", "milliseconds per step (lower is better)", fastest, decode()),
        ("Prefill, 3 layers", "prompt tokens", "thousand tokens per second (higher is better)", default, prefill()),
    ]
    for axes, (name, x, y, peer, points) in zip(figure.subplots(1, 3), panels, strict=True):
        for index, (label, colour) in enumerate(((OURS, OUR_COLOUR), (peer, PEER_COLOUR))):
            values = [pair[index] for pair in points.values()]
            axes.plot(list(points), values, "o-", color=colour, label=label, markersize=4, zorder=3 - index)
        axes.set(title=name, xlabel=x, ylabel=y, xscale="log")
        if "micro" in y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        ticks = [tick for tick in TICKS if min(points) <= tick <= max(points)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    with rc_context({"svg.hashsalt": path.stem}):  # so that the same results give the same file
        figure.savefig(path, metadata={"Date": None, "Description": digest()})


def rendered(document: str) -> str:
    """README.md with the table as the results have it."""
    return MARKED.sub(lambda marked: f"{marked[1]}\n{glance()}\n{marked[3]}", document)


if __name__ == "__main__":
    plot(PLOT)
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))
