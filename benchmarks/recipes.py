"""Write docs/recipes from `explain`, the descriptions of published models, and the files in benchmarks/results.

python -m benchmarks.recipes            # rewrites all pages
python -m benchmarks.recipes --check    # exits with 1 if a page is stale
"""

import math
import re
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.recipe_models import RECIPES, Measured, Recipe
from benchmarks.tables import OURS, PEERS, ROOT, checks_only, fastest_peer, results, table, write
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.quoting import any_of
from warmup import memory
from warmup.choose import choose
from warmup.report import ChoiceReport, SplitReport
from warmup.target import GPUS, MAX_TOKENS, MOST_GPUS, NODE, UTILIZATION, Target

FOLDER = ROOT / "docs" / "recipes"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
CONFIGS = [ROOT / "tests" / "checkpoint" / name for name in ("configs", "configs_2026")]
CONTEXT = 32_768
SEQUENCES = 64  # of a decode step, as `explain` counts its bytes
WIDTH = 120
# Of data sheets (SXM): bytes per second of memory, and dense FP8 operations per second.
PEAKS = {"h200": (4.8e12, 1.979e15), "h100": (3.35e12, 1.979e15), "h20": (4.0e12, 0.296e15)}
FEWEST, LATENCY, THROUGHPUT = "fewest GPUs", "latency", "throughput"
HEADER = (
    "GPUs", "best for", "split", "weights, GB", "KV cache, tokens", "decode 1, ms", f"decode {SEQUENCES}, ms",
    f"prefill {MAX_TOKENS:,}, ms",
)  # fmt: skip
ABOUT = (
    "Weights are those of the GPU that holds the most; the KV cache is that of all GPUs, for sequences of up to "
    f"{CONTEXT:,} tokens and {UTILIZATION:.0%} of the memory. Steps decode 1 or {SEQUENCES} sequences in all, or "
    f"read {MAX_TOKENS:,} tokens. Their times are expected, not measured, and lower bounds: the weights that a GPU "
    "reads, or the products that it computes, at the peak of its data sheet, for tokens that choose experts at "
    "random. Attention, sums over GPUs and the host come on top; tokens that share experts read less. `fp8moe-"
    "warmup explain` has other lengths, cache types and numbers of GPUs."
)
WHY = {
    "one GPU": "one GPU, nothing to split.",
    "pp": "a stage on each node, so that only the tokens' hidden states cross the network; a step passes all stages.",
    "tp": "each GPU holds a part of every expert and of the attention heads, so that it reads the fewest bytes of "
    "weights for one sequence.",
    "ep": "attention is split by heads, and each GPU holds whole experts, which need no padding.",
    "dp": "each GPU has the attention and the KV cache of its own sequences, so that no cache is held twice, and whole "
    "experts; tokens go to the GPUs of their experts and back.",
    "tp dp": "attention is split within a node and replicated on the others; experts are whole, over all GPUs.",
}


class Choice(NamedTuple):
    """A split on GPUs of one kind, and what it is best for."""

    gpu: str
    split: SplitReport
    purposes: list[str]


@cache
def model_of(recipe: Recipe) -> Model:
    (path,) = (folder / f"{recipe.config}.json" for folder in CONFIGS if (folder / f"{recipe.config}.json").exists())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(path.read_bytes())
        return read_model(Path(folder))


@cache
def report(recipe: Recipe, gpu: str, gpus: int | None = None) -> ChoiceReport:
    target = Target(gpu, gpus, UTILIZATION, fp8_cache=False, max_model_len=CONTEXT, max_tokens=MAX_TOKENS)
    return choose(model_of(recipe), target, recipe.checkpoint)


@cache
def choices(recipe: Recipe) -> tuple[Choice, ...]:
    """Returns the best split on the fewest GPUs of each kind, and the best ones on a node, or on two if none fits."""
    found = []
    for gpu in PEAKS:
        splits = {split.options: split for split in report(recipe, gpu).splits if split.fits}
        fewest = min((split.gpus for split in splits.values()), default=None)
        if fewest is None:
            continue
        small, node = report(recipe, gpu, fewest), report(recipe, gpu, max(fewest, NODE))
        best: dict[str, list[str]] = {}
        for purpose, options in ((FEWEST, small.latency), (LATENCY, node.latency), (THROUGHPUT, node.throughput)):
            assert options
            best.setdefault(options, []).append(purpose)
        found += [Choice(gpu, splits[options], purposes) for options, purposes in best.items()]
    return tuple(found)


def page(recipe: Recipe) -> str:
    """Returns the page of a model."""
    found, experts = choices(recipe), memory.without_mtp(model_of(recipe)).experts
    parts = [
        f"# {recipe.title}",
        wrapped(f"{experts.layers} layers of {experts.experts} experts, {experts.topk} per token. {recipe.about}"),
        table(HEADER, (row(recipe, choice) for choice in found)).rstrip(),
        *(wrapped(text) for text in unfitting(found)),
        wrapped(ABOUT),
        "\n".join(wrapped(f"- {note}", "  ") for note in notes(recipe, found)),
        "## Serve",
        *(part for chosen in by_gpus(found) for part in serve(chosen)),
        "## What was measured",
        *measured(recipe),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def row(recipe: Recipe, choice: Choice) -> list[str]:
    split, (bandwidth, operations) = choice.split, PEAKS[choice.gpu]
    decode = [f"{(count or 0) / bandwidth * 1e3:.1f}" for count in (split.read_bytes, split.step_bytes)]
    prefill = products(model_of(recipe)) * MAX_TOKENS / (parallel(split).ranks * operations)
    return [
        gpus_of(choice), ", ".join(choice.purposes), f"`{split.options}`",
        f"{(split.weight_bytes or 0) / 1e9:.1f}", f"{split.cache_tokens:,}", *decode, f"{prefill * 1e3:.0f}",
    ]  # fmt: skip


def gpus_of(choice: Choice) -> str:
    return f"{choice.split.gpus} x {GPUS[choice.gpu].name}"


def products(model: Model) -> float:
    """Returns the operations of a token's products with the weights, without those of the output head."""
    loaded = memory.without_mtp(model)
    *shapes, _ = memory.weight_shapes(loaded, Parallel())
    share = loaded.experts.topk / loaded.experts.experts
    return sum(
        2.0 * shape.layers * math.prod(shape.shape) * (share if shape.name.startswith("experts.") else 1)
        for shape in shapes
    )


def parallel(split: SplitReport) -> Parallel:
    words = split.options.replace("--", "").split()
    return Parallel(**{name: int(size) for name, size in zip(words[::2], words[1::2], strict=True)})


def unfitting(found: tuple[Choice, ...]) -> Iterator[str]:
    kinds = [GPUS[gpu].name for gpu in PEAKS if gpu not in {choice.gpu for choice in found}]
    if kinds:
        yield f"It does not fit on up to {MOST_GPUS} GPUs of these kinds: {', '.join(kinds)}."


def notes(recipe: Recipe, found: tuple[Choice, ...]) -> list[str]:
    """Returns the sentences of `explain` about the model, of the first choice."""
    first = found[0]
    return report(recipe, first.gpu, first.split.gpus).notes


def by_gpus(found: tuple[Choice, ...]) -> list[list[Choice]]:
    """Returns the choices of each split, those with the fewest GPUs first."""
    splits: dict[str, list[Choice]] = {}
    for choice in sorted(found, key=lambda choice: choice.split.gpus):
        splits.setdefault(choice.split.options, []).append(choice)
    return list(splits.values())


def serve(chosen: list[Choice]) -> Iterator[str]:
    split = chosen[0].split
    gpus = any_of(tuple(f"{gpus_of(choice)} ({', '.join(choice.purposes)})" for choice in chosen))
    yield wrapped(f"`{split.options}` on {gpus}: {why(parallel(split))}")
    yield command(split.vllm) if split.vllm else "vLLM has no such split."
    yield command(split.sglang) if split.sglang else "SGLang has no such split."
    if split.gpus > NODE:
        yield wrapped("Run it on each node, RANK counts from 0; all of vLLM's but the first also need `--headless`.")


def why(way: Parallel) -> str:
    if way.gpus == 1:
        return WHY["one GPU"]
    if way.pp > 1:
        return WHY["pp"]
    if way.dp > 1:
        return WHY["dp" if way.tp == 1 else "tp dp"]
    return WHY["ep" if way.ep > 1 else "tp"]


def command(text: str) -> str:
    """Returns a command on lines that are not too long, with options and their values together."""
    lines = [""]
    for part in re.split(r" (?=--)", text):
        if lines[-1] and len(lines[-1]) + len(part) > WIDTH - 12:
            lines.append("")
        lines[-1] = f"{lines[-1]} {part}".strip()
    return " \\\n        ".join([f"    {lines[0]}", *lines[1:]])


def measured(recipe: Recipe) -> Iterator[str]:
    """Yields the states in docs/compatibility.md, and the tables of what was measured."""
    (line,) = (line for line in COMPATIBILITY.read_text().splitlines() if line.startswith(f"| {recipe.family} |"))
    _, _, _, layer, engine, *_ = (cell.strip() for cell in line.split("|"))
    link = "[Compatibility](../compatibility.md#models-of-2026) has the details."
    if (layer, engine) == ("expected", "expected"):
        yield wrapped(f"Nothing: no GPU has run this model yet. {link}")
    else:
        yield wrapped(f"The layer of its experts: {layer}. An engine of vLLM with weights: {engine}. {link}")
    for found in recipe.measured:
        where = f"[performance](../performance.md), `benchmarks/results/{found.result}.json`"
        yield wrapped(f"{found.what[0].upper()}{found.what[1:]} ({where}):")
        yield MEASURED[found.result.partition("-")[0]](found).rstrip()


def layer_table(found: Measured) -> str:
    rows = [row for row in results(found.result)["rows"] if row["model"] == found.model]
    best = [min(us for name, us in row["peers"].items() if name in PEERS and not isinstance(us, str)) for row in rows]
    header = ["tokens", f"{OURS}, us", "vLLM's best backend, us"]
    return table(
        header, ([f"{r['tokens']:,}", f"{r['us']:,.0f}", f"{us:,.0f}"] for r, us in zip(rows, best, strict=True))
    )


def mxfp4_table(found: Measured) -> str:
    rows = [row for row in results(found.result)["rows"] if row["shape"] == found.model]
    peers = any_of(tuple(f"`{name}`" for name in rows[0]["peers"]))
    header = ["tokens", f"{OURS}, us", "re-encoded to block FP8, us", f"{peers}, us"]
    times = ((row["tokens"], row["us"], row["fp8_us"], fastest_peer(row)) for row in rows)
    return table(header, ([f"{figure:,.0f}" for figure in cells] for cells in times))


def engine_table(found: Measured) -> str:
    cells: dict[str, dict[str, float]] = {}
    for row in results(found.result)["rows"]:
        if row["model"] == found.model:
            cells.setdefault(row["cell"], {})[row["engine"]] = row["ms"]
    header = ["step", f"{OURS}, ms", "vLLM's `fp8`, ms"]
    return table(header, ([cell, f"{ms[OURS]:.1f}", f"{ms['vllm']:.1f}"] for cell, ms in cells.items()))


MEASURED = {"models_layer": layer_table, "mxfp4_layer": mxfp4_table, "engine_e2e": engine_table}


def index() -> str:
    """Returns the page that lists the others."""
    rows = []
    for recipe in RECIPES:
        fewest = {choice.gpu: str(choice.split.gpus) for choice in choices(recipe) if FEWEST in choice.purposes}
        rows.append([f"[{recipe.title}]({recipe.page}.md)", *(fewest.get(gpu, "does not fit") for gpu in PEAKS)])
    about = (
        "Commands, splits, memory and expected step times of models, for vLLM and SGLang. "
        f"The fewest GPUs for sequences of up to {CONTEXT:,} tokens, of 1, 2, 4, {NODE} and {MOST_GPUS}:"
    )
    kinds = [GPUS[gpu].name for gpu in PEAKS]
    written = "`python -m benchmarks.recipes` writes these pages from `explain` and descriptions of models."
    return "\n\n".join(["# Recipes", wrapped(about), table(["model", *kinds], rows).rstrip(), wrapped(written)]) + "\n"


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def pages() -> dict[Path, str]:
    """Returns the text of each page."""
    return {FOLDER / "README.md": index(), **{FOLDER / f"{recipe.page}.md": page(recipe) for recipe in RECIPES}}


def main() -> None:
    check = checks_only(__doc__)
    write(pages(), check, "recipes")


if __name__ == "__main__":
    main()
