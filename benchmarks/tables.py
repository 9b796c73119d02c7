"""Write the tables of docs/performance.md from the files in benchmarks/results, and the sections of docs/tuning.md.

python -m benchmarks.tables            # rewrites the text between the markers
python -m benchmarks.tables --check    # exits with 1 if a document is stale
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import kernels, tuning

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
OURS = "fp8moe"
PEERS = "triton", "deepgemm", "cutlass"  # of `models_layer`
LAYERS = {"dsv3-ep1": "EP1", "dsv3-tp8": "TP8", "qwen3-30b": "Qwen3"}
Row = dict[str, Any]


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = [str(cell) for cell in header]
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def best(rows: Iterable[Row], backend: str, time: str) -> tuple[float, float]:
    """Our time, and that of the fastest peer that finished."""
    times = {row[backend]: row[time] for row in rows if time in row}
    ours = times.pop(OURS)
    return ours, min(times.values())


def layers(*found: Row) -> str:
    """Whole layers: the best peer's time over ours, and ours in microseconds."""
    rows = [row for part in found for row in part["rows"]]

    def cell(tokens: int, shape: str) -> str:
        ours, peer = best((r for r in rows if (r["T"], r["shape"]) == (tokens, shape)), "peer", "us")
        return f"{peer / ours:.2f} ({ours:.0f})"

    steps = sorted({row["T"] for row in rows})
    return table(["tokens", *LAYERS.values()], ([t, *(cell(t, shape) for shape in LAYERS)] for t in steps))


def by_tokens(found: Row, column: str, cell: Callable[[Row], str], tokens: str = "tokens") -> str:
    """A row for each number of tokens, or of those of an expert, with a cell for each model or shape."""
    cells = {(row[column], row[tokens]): cell(row) for row in found["rows"]}
    names, steps = (list(dict.fromkeys(row[key] for row in found["rows"])) for key in (column, tokens))
    header = [tokens.replace("_", " "), *names]
    return table(header, ([t, *(cells[name, t] for name in names)] for t in steps))


def batched(found: Row) -> str:
    """Batched experts by rows of each: DeepGEMM's time over ours, and ours in microseconds."""

    def cell(row: Row) -> str:
        ours, peer = row["us"][OURS], row["us"]["deepgemm"]
        return f"{peer / ours:.2f} ({ours:.0f})"

    return by_tokens(found, "shape", cell, "rows_per_expert")


def models(found: Row) -> str:
    """Experts of models with their activations: vLLM's fastest backend over ours, and ours in microseconds."""

    def cell(row: Row) -> str:
        peers = [us for name, us in row["peers"].items() if name in PEERS and not isinstance(us, str)]
        return f"{min(peers) / row['us']:.2f} ({row['us']:.0f})"

    return by_tokens(found, "model", cell)


def dense(found: Row, time: str, cell: Callable[[float, float], str]) -> str:
    """Dense layers, by shape and number of rows."""
    rows = found["rows"]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    steps = sorted({row["tokens"] for row in rows})

    def cells(n: int, k: int) -> list[str]:
        of_shape = [row for row in rows if (row["n"], row["k"]) == (n, k)]
        return [cell(*best((r for r in of_shape if r["tokens"] == t), "backend", time)) for t in steps]

    return table(
        ["N x K", *("1 row" if t == 1 else f"{t} rows" for t in steps)],
        ([f"{n} x {k}", *cells(n, k)] for n, k in shapes),
    )


def dense_many_rows(found: Row) -> str:
    """DeepGEMM's time over ours with 4096 rows. `ours` is the fastest of the widths that the plan chooses from."""
    kept = ("144", "176", "192", "256", "256 16 MB")  # 16 MB of rows per band, as for K of up to 2048
    rows = [row for row in found["rows"] if row["run"] == 2 and "deepgemm" in row["burst"]]

    def cells(burst: dict[str, float]) -> list[str]:
        ours = min(burst[name] for name in kept if name in burst)
        return [f"{ours:.1f} / {burst['deepgemm']:.1f}", ratio(ours, burst["deepgemm"])]

    header = ["N x K", "ours / DeepGEMM, us", "DeepGEMM over ours"]
    return table(header, ([f"{row['n']} x {row['k']}", *cells(row["burst"])] for row in rows))


def times(ours: float, peer: float) -> str:
    return f"{ours:.1f} / {peer:.1f}"


def ratio(ours: float, peer: float) -> str:
    return f"{peer / ours:.2f}"


def grouped_gemms(found: Row) -> str:
    """DeepGEMM's time over ours, after a pause / sustained."""
    rows = found["rows"]
    cases = list(dict.fromkeys((r["layout"], r["tokens"], r["even"]) for r in rows))
    header = [f"{layout}, {tokens} tokens{', even counts' if even else ''}" for layout, tokens, even in cases]

    def cell(row: Row) -> str:
        return f"{row['deepgemm_us'] / row['us']:.2f} / {row['deepgemm_sustained_us'] / row['sustained_us']:.2f}"

    cells = {(r["gemm"], (r["layout"], r["tokens"], r["even"])): cell(r) for r in rows}
    gemms = dict.fromkeys(r["gemm"] for r in rows)
    return table(["GEMM", *header], ([gemm, *(cells[gemm, case] for case in cases)] for gemm in gemms))


def humming_gemms(found: Row) -> str:
    """Returns the fastest of Humming's calls over the faster of our ops, and the latter in microseconds."""
    rows = [row for row in found["rows"] if "us" in row]

    def cell(gemm: str, count: int) -> str:
        us = {row["call"]: row["us"] for row in rows if (row["gemm"], row["rows"]) == (gemm, count)}
        ours = min(us.pop(call) for call in ("masked", "psum"))
        return f"{min(us.values()) / ours:.2f} ({ours:.0f})"

    gemms, counts = (list(dict.fromkeys(row[key] for row in rows)) for key in ("gemm", "rows"))
    return table(["rows per expert", *gemms], ([count, *(cell(gemm, count) for gemm in gemms)] for count in counts))


def humming_layers(found: Row) -> str:
    """Each Humming layer over ours, and ours in microseconds."""
    rows = [row for row in found["rows"] if "us" in row]
    peers = [name for name in dict.fromkeys(row["backend"] for row in rows) if name != OURS]

    def cells(layer: str, tokens: int) -> list[Any]:
        us = {row["backend"]: row["us"] for row in rows if (row["layer"], row["tokens"]) == (layer, tokens)}
        return [LAYERS[layer], tokens, f"{us[OURS]:.0f}", *(f"{us[peer] / us[OURS]:.2f}" for peer in peers)]

    cases = dict.fromkeys((row["layer"], row["tokens"]) for row in rows)
    header = ["layer", "tokens", "ours, us", *(f"`{peer}` over ours" for peer in peers)]
    return table(header, (cells(*case) for case in cases))


def fastest_peer(row: Row) -> float:
    """Microseconds of the fastest one that did not fail, in a row of `mxfp4_layer`."""
    times: list[float] = [us for us in row["peers"].values() if not isinstance(us, str)]
    return min(times)


def mxfp4_layers(found: Row) -> str:
    """Our layers from packed MXFP4: block FP8 and the fastest peer over them, and their microseconds."""

    def cell(row: Row) -> str:
        return f"{row['fp8_us'] / row['us']:.2f}, {fastest_peer(row) / row['us']:.2f} ({row['us']:.0f})"

    return by_tokens(found, "shape", cell)


def mxfp4_peers(found: Row) -> str:
    """Our layers from packed MXFP4: block FP8 and each peer over them, and their microseconds."""

    def cell(row: Row) -> str:
        others = (row["fp8_us"], *row["peers"].values())
        return ", ".join(f"{us / row['us']:.2f}" for us in others) + f" ({row['us']:.0f})"

    return by_tokens(found, "shape", cell)


def batch_invariance(found: Row) -> str:
    """Returns the sizes at which the mode changes the kernels."""
    rows = found["rows"]
    changed = [row for row in rows if not row["same_bits"] or row["cost"] > 1.1]
    return table(
        ["layer", "tokens", "us", "batch-invariant, us", "cost"],
        ([r["layer"], r["tokens"], r["us"], r["invariant_us"], f"{r['cost']:.2f}"] for r in changed),
    )


def engines(found: Row, model: str) -> str:
    """Whole engines: milliseconds of each, and the best peer's over ours."""
    rows = [row for row in found["rows"] if row["model"] == model]
    names = list(dict.fromkeys(row["engine"] for row in rows))

    def text(row: Row) -> str:
        busy = row["gpu_busy_ms"]  # unknown if the run ended before this cell was profiled
        return f"{row['ms']:.2f}" + (f" ({busy:.2f})" if busy else "")

    def cells(cell: str) -> list[str]:
        of_cell = {row["engine"]: row for row in rows if row["cell"] == cell}
        return [cell, *(text(of_cell[engine]) for engine in names), ratio(*best(of_cell.values(), "engine", "ms"))]

    header = ["cell", *(f"`{engine}`, ms (on the GPU)" for engine in names), "best peer over ours"]
    return table(header, (cells(cell) for cell in dict.fromkeys(row["cell"] for row in rows)))


def requests(*found: Row, model: str) -> str:
    """Returns what servers did by traffic and load: the figures of all engines, and our tokens over the best peer's.

    Of an engine with a load in several results, those of the last.
    """
    rows = [row for part in found for row in part["rows"] if row["model"] == model and "traffic" in row]
    names = list(dict.fromkeys(row["engine"] for row in rows))
    own = own_server(found[0], names)

    def cells(traffic: str, concurrency: int | None, rate: float | None) -> list[str]:
        load = traffic, concurrency, rate
        of_load = {row["engine"]: row for row in rows if load_of(row) == load}
        tokens = {name: row["tokens_per_s_per_gpu"] for name, row in of_load.items()}
        ours = tokens.pop(own, None)

        def each(text: Callable[[Row], str]) -> str:
            return " / ".join(text(of_load[name]) if name in of_load else "-" for name in names)

        return [
            traffic,
            str(concurrency) if concurrency else f"{rate:g} per s",
            each(lambda row: f"{row['tokens_per_s_per_gpu']:,.0f}"),
            each(lambda row: f"{row['ttft_ms']:.0f} ({row['ttft_ms_p99']:.0f})"),
            each(lambda row: f"{row['tpot_ms']:.2f} ({row['tpot_ms_p99']:.2f})"),
            f"{ours / max(tokens.values()):.2f}" if ours and tokens else "",
        ]

    engines = " / ".join(f"`{name}`" for name in names)
    header = ["traffic", "requests", f"tokens per s and GPU, {engines}", "TTFT, ms (p99)", "TPOT, ms (p99)"]
    return table([*header, "ours over best peer"], (cells(*load) for load in dict.fromkeys(map(load_of, rows))))


def own_server(found: Row, names: Iterable[str]) -> str:
    return next((name for name in names if OURS in found["engines"][name]), OURS)


def steps(found: Row, model: str) -> str:
    """Returns the steps of servers as a client sees them: the milliseconds of each start, the best peer's over ours."""
    rows = [row for row in found["rows"] if row["model"] == model and "cell" in row]
    names = list(dict.fromkeys(row["engine"] for row in rows))
    own = own_server(found, names)

    def cells(cell: str) -> list[str]:
        starts = {name: [r["ms"] for r in rows if (r["cell"], r["engine"]) == (cell, name)] for name in names}
        times = {name: median(ms) for name, ms in starts.items() if ms}
        ours = times.pop(own, None)
        shown = [", ".join(f"{ms:.2f}" for ms in starts[name]) or "-" for name in names]
        return [cell, *shown, ratio(ours, min(times.values())) if ours and times else ""]

    header = ["cell", *(f"`{name}`, ms" for name in names), "best peer over ours"]
    return table(header, (cells(cell) for cell in dict.fromkeys(row["cell"] for row in rows)))


def load_of(row: Row) -> tuple[str, int | None, float | None]:
    return row["traffic"], row.get("concurrency"), row.get("rate")


def expert_parallel(found: Row) -> str:
    """Returns a table of layers whose experts are on several GPUs: microseconds, and those of others over push's."""

    def cells(row: Row) -> list[str]:
        (peer,) = row["peers"].values()
        columns = [row[name] for name in ("layer", "nccl", "nccl_fp8")] + [peer, row["push"]]
        faster = min((us for us in columns[1:3] if not isinstance(us, str)), default="-")
        return [
            row["shape"],
            f"{row['tokens_per_rank']:,}",
            *("-" if isinstance(us, str) else f"{us:.0f}" for us in columns),
            *("-" if isinstance(us, str) else f"{us / row['push']:.2f}" for us in (faster, peer)),
        ]

    (peer,) = found["rows"][0]["peers"]
    header = [
        "shape",
        "tokens per GPU",
        "layer",
        "NCCL",
        "NCCL, e4m3",
        peer,
        "push",
        "faster NCCL over push",
        "peer over push",
    ]
    return table(header, (cells(row) for row in found["rows"]))


def sglang_layer(found: Row) -> str:
    """Returns a table of a layer in SGLang: microseconds by backend of the experts, and the best peer's over ours."""
    rows = [row for row in found["rows"] if "us" in row]
    names = list(dict.fromkeys(row["backend"] for row in rows))

    def cells(layer: str, tokens: int) -> list[Any]:
        of_case = {row["backend"]: row for row in rows if (row["layer"], row["tokens"]) == (layer, tokens)}
        times = [of_case[name]["us"] for name in names]
        return [layer, tokens, *times, ratio(*best(of_case.values(), "backend", "us"))]

    cases = dict.fromkeys((row["layer"], row["tokens"]) for row in rows)
    header = ["layer", "tokens", *(f"`{name}`, us" for name in names), "best peer over ours"]
    return table(header, (cells(*case) for case in cases))


def host_cost(found: Row) -> str:
    """Microseconds of the host per call of an op, in several processes."""
    processes = found["processes"]

    def cells(i: int) -> list[Any]:
        rows = [process[i] for process in processes]
        calls = [row["elsewhere"] for row in rows]
        least = {key: min(row[key] for row in rows) for key in ("launches", "new_length")}
        return [rows[0]["op"], rows[0]["tokens"], min(calls), round(median(calls), 2), *least.values()]

    header = ["op", "tokens", "a call, us", "median process", "launches alone", "first call with this many tokens"]
    return table(header, (cells(i) for i in range(len(processes[0]))))


def engine_decode(found: Row) -> str:
    engines = found["engines"]
    batches = engines[OURS]["batches"]

    def cells(batch: str) -> list[str]:
        rows = [engine["batches"][batch] for engine in engines.values()]
        step, busy = (" / ".join(f"{row[key]:.2f}" for row in rows) for key in ("ms", "gpu_ms"))
        return [step, busy, " / ".join(f"{row['moe_ms']:.3f}" for row in rows)]

    return table(["batch", "step", "GPU busy", "MoE layers"], ([batch, *cells(batch)] for batch in batches))


def engine_prefill(found: Row) -> str:
    engines = found["engines"]
    return table(
        ["engine", "prompt tokens per second"],
        ([name, f"{engine['tokens_per_s']:,.0f}"] for name, engine in engines.items()),
    )


def serve_ready(found: Row) -> str:
    names = {"bundle": "`fp8moe` with a bundle, `FP8MOE_JIT=forbid`", "fp8": "`fp8` of vLLM, with its warm-up"}

    def seconds(name: str) -> list[str]:
        return [f"{found[f'{name} {start}']['ready_s']:.0f}" for start in ("cold", "warm")]

    rows = ([text, *seconds(name)] for name, text in names.items())
    return table(["quantization", "cold, s", "warm, s"], rows)


def agreement(*found: Row) -> str:
    pairs = {name: pair for part in found for name, pair in part["pairs"].items()}
    return table(
        ["engines", "next token", "prefix", "log-probability differs by"],
        (
            [name, f"{pair['next_token']:.3f}", f"{pair['prefix']:.1f}", f"{pair['logprob']:.3f}"]
            for name, pair in pairs.items()
        ),
    )


def over_bf16(engine: Row) -> str:
    off = engine["against_bf16"]
    return f"{off['percent']:+.3f}% ({off['low']:.3f} to {off['high']:.3f})" if off else ""


def perplexity(found: Row) -> str:
    def row(name: str, engine: Row) -> list[str]:
        return [name, f"{engine['perplexity']:.3f}", over_bf16(engine)]

    engines = found["engines"]
    return table(["engine", "perplexity", "over BF16 (95% interval)"], (row(*item) for item in engines.items()))


CHECKPOINTS = {
    "small-fp8": "block FP8",
    "small-row": "FP8, a scale for each row",
    "clamped-fp8": "block FP8, limited SwiGLU",
    "clamped-row": "FP8, a scale for each row, limited SwiGLU",
}


def perplexity_by_format(*found: Row) -> str:
    """Our engines of several formats, each beside BF16."""

    def row(part: Row) -> list[str]:
        bf16, ours = (part["engines"][name] for name in ("bf16", OURS))
        name = CHECKPOINTS[part["checkpoint"]["name"]]
        return [name, f"{bf16['perplexity']:.3f}", f"{ours['perplexity']:.3f}", over_bf16(ours)]

    return table(["weights", "bf16", OURS, "over BF16 (95% interval)"], map(row, found))


def checks(found: Row) -> str:
    checks = {name: part for name, part in found.items() if isinstance(part, dict) and "summary" in part}
    return table(["check", "result"], ([name, ", ".join(check["summary"])] for name, check in checks.items()))


class Table(NamedTuple):
    """A table of the document, made of results by their names."""

    names: tuple[str, ...]
    make: Callable[..., str]

    def text(self) -> str:
        """Returns the table, and when and with which kernels it was measured."""
        found = [results(name) for name in self.names]
        measured = dict.fromkeys(f"{part['date']}, {kernels.described(part.get('kernel_hashes'))}" for part in found)
        line = textwrap.fill(f"Measured {'; '.join(measured)}.", 120, break_on_hyphens=False)
        return f"{self.make(*found)}\n{line}\n"


TABLES = {
    "layer": Table(("moe_layer-2026-11-22", "moe_layer-other_sizes-2026-11-22"), layers),
    "layer-h100": Table(("moe_layer-h100-2026-11-26",), layers),
    "batched": Table(("batched_layer-2026-11-30",), batched),
    "models-h100": Table(("models_layer-2026-11-26",), models),
    "more-models-h100": Table(("models_layer-h100-2026-11-28",), models),
    "models-h200": Table(("models_layer-2026-11-27",), models),
    "mxfp4-layers": Table(("mxfp4_layer-all_peers-2026-12-01",), mxfp4_layers),
    "mxfp4-layers-h100": Table(("mxfp4_layer-h100-2026-11-27",), mxfp4_peers),
    "expert-parallel": Table(("ep_layer-4_gpus-2026-11-30",), expert_parallel),
    "expert-parallel-h100": Table(("ep_layer-4_gpus-h100-2026-11-27",), expert_parallel),
    "layer-skewed": Table(("moe_layer-skew-2026-11-23",), layers),
    "dense-decode-gemm": Table(("dense_gemm-decode-2026-11-23",), partial(dense, time="gemm_us", cell=times)),
    "dense-decode-linear": Table(("dense_gemm-decode-2026-11-23",), partial(dense, time="linear_us", cell=times)),
    "dense-prefill-gemm": Table(("dense_gemm-prefill-2026-11-23",), partial(dense, time="gemm_us", cell=ratio)),
    "dense-prefill-linear": Table(("dense_gemm-prefill-2026-11-23",), partial(dense, time="linear_us", cell=ratio)),
    "dense-many-rows": Table(("dense_many_rows-2026-11-24",), dense_many_rows),
    "grouped-gemms": Table(("grouped_gemm-2026-11-21",), grouped_gemms),
    "humming-gemms": Table(("grouped_gemm-humming-2026-11-26",), humming_gemms),
    "humming-layers": Table(("humming_layer-2026-11-26",), humming_layers),
    "batch-invariance": Table(("batch_invariance-2026-11-23",), batch_invariance),
    "engine-decode": Table(("engine_decode-2026-11-23",), engine_decode),
    "engine-prefill": Table(("engine_prefill-2026-11-21",), engine_prefill),
    "engines-qwen3-48": Table(("engine_e2e-qwen3-48-2026-11-26",), partial(engines, model="qwen3-48")),
    "engines-dsv3-tp8": Table(("engine_e2e-dsv3-tp8-2026-11-26",), partial(engines, model="dsv3-tp8")),
    "engines-qwen35": Table(("engine_e2e-qwen3.5-2026-11-27",), partial(engines, model="qwen3.5")),
    "engines-qwen3": Table(("engine_e2e-qwen3-2026-11-25",), partial(engines, model="qwen3")),
    "engines-dsv3": Table(("engine_e2e-dsv3-21_rounds-2026-11-25",), partial(engines, model="dsv3")),
    "requests-qwen3-48": Table(
        ("bench_serve-qwen3-48-2026-11-27", "bench_serve-qwen3-48-1k_8k-2026-12-01"),
        partial(requests, model="qwen3-48"),
    ),
    "requests-qwen3-48-deepgemm": Table(
        ("bench_serve-qwen3-48-deepgemm-2026-11-30",), partial(requests, model="qwen3-48")
    ),
    "requests-qwen3-24": Table(("bench_serve-qwen3-24-2026-11-30",), partial(requests, model="qwen3-24")),
    "requests-deepgemm": Table(("bench_serve-qwen3-24-deepgemm-2026-11-30",), partial(requests, model="qwen3-24")),
    "requests-peers": Table(("bench_serve-qwen3-24-peers-2026-11-30",), partial(requests, model="qwen3-24")),
    "requests-qwen3-12": Table(("bench_serve-qwen3-12-2026-11-29",), partial(requests, model="qwen3-12")),
    "requests-dsv3-tp8": Table(("bench_serve-dsv3-tp8-2026-11-27",), partial(requests, model="dsv3-tp8")),
    "requests-dsv3-tp8-shapes": Table(
        ("bench_serve-dsv3-tp8-shapes-2026-11-30", "bench_serve-dsv3-tp8-more_shapes-2026-12-01"),
        partial(requests, model="dsv3-tp8"),
    ),
    "requests-sglang": Table(("bench_serve-sglang-qwen3-48-2026-11-27",), partial(requests, model="qwen3-48")),
    "requests-qwen3-48-dp4": Table(("bench_serve-qwen3-48-dp4-2026-11-27",), partial(requests, model="qwen3-48")),
    "requests-gpt-oss-20b": Table(("bench_serve-gpt-oss-20b-2026-11-27",), partial(requests, model="gpt-oss-20b")),
    "requests-gpt-oss-20b-decode": Table(
        ("bench_serve-gpt-oss-20b-decode-2026-11-27",), partial(requests, model="gpt-oss-20b")
    ),
    "sglang-layer": Table(("sglang_layer-2026-11-24",), sglang_layer),
    "sglang-engines-qwen3": Table(("sglang_e2e-2026-11-25",), partial(engines, model="qwen3-24layer")),
    "sglang-engines-dsv3": Table(("sglang_e2e-dsv3-2026-11-25",), partial(engines, model="dsv3-5layer")),
    "host-cost": Table(("host_cost-2026-11-26",), host_cost),
    "serve-ready": Table(("serve_ready-2026-11-21",), serve_ready),
    "agreement": Table(("engine_agreement-2026-11-21", "engine_agreement-default-2026-11-21"), agreement),
    "perplexity": Table(("perplexity-2026-11-22",), perplexity),
    "perplexity-by-format": Table(tuple(f"perplexity-{name}-2026-11-27" for name in CHECKPOINTS), perplexity_by_format),
    "checks": Table(("gpu_checks-2026-11-26",), checks),
}


def rendered(document: str) -> str:
    """Returns the document with each table as the results have it.

    Raises:
        KeyError: a marker names a table that does not exist.
    """
    return MARKED.sub(lambda marked: f"{marked[1]}\n{TABLES[marked[2]].text()}\n{marked[3]}", document)


DOCUMENTS: dict[Path, Callable[[str], str]] = {DOCUMENT: rendered, tuning.DOCUMENT: tuning.rendered}


def checks_only(about: str) -> bool:
    """Returns whether the command line of a program that writes documents has --check."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    return bool(parser.parse_args().check)


def write(texts: dict[Path, str], check: bool, program: str) -> None:
    """Write the files, or with `check`, exit with 1 if one is stale."""
    for path, text in texts.items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is stale: run python -m benchmarks.{program}")


def main() -> None:
    check = checks_only(__doc__)
    write({document: render(document.read_text()) for document, render in DOCUMENTS.items()}, check, "tables")


if __name__ == "__main__":
    main()
