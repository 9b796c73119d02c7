"""SGLang engines with different FP8 backends taking turns on one GPU: prefill and decode times, GPU-busy time, greedy
agreement.

    python -m benchmarks.engine.sglang_e2e --models DIR [DIR ...] [--twins DIR [DIR ...]] \
        --out benchmarks/results/sglang_e2e-<date>.json

Engines:
- `fp8moe`: this package;
- `sglang`: SGLang's `fp8` as it starts by itself on Hopper: Triton for the experts, and for dense layers DeepGEMM;
- `sglang-deepgemm`: DeepGEMM for the experts, too.

All engines of all checkpoints exist at once, each in processes of its own, with CUDA graphs for the cells' decode steps
and prefills. Cells are those of `engine_e2e`; engines of a checkpoint take turns in each round while the others sleep,
as the scheduler of an idle engine otherwise takes a core. All share the same few cores, and answer a request that is
not timed before each that is: most of a short step is the host's work, whose pace depends on the core, its caches and
its clock. `gpu_busy_ms` is how long at least one kernel runs, from a separate pass with SGLang's profiler.

Agreement is of each two engines on the same checkpoint, as `benchmarks.accuracy.agreement` describes it. `--twins` adds
an engine of the unquantized checkpoint to it.
"""

import argparse
import gzip
import itertools
import json
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy.agreement import compare
from benchmarks.checkpoints.answers import random_prompts
from benchmarks.engine.cores import share_cores
from benchmarks.engine.e2e_engine import RandomPrompts
from benchmarks.engine.e2e_report import table
from benchmarks.engine.engine_e2e import Engines, cells, progress
from benchmarks.engine.profiles import Times, of_cell, summary, times
from benchmarks.engines import CONFIG_KEYS, read_config
from benchmarks.report import write_report
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare.cells import SHORT, Cell, Clock, longest
from fp8moe_plugin.compare.process import EngineProcess
from warmup.report import installed
from warmup.values import count

ENGINES: dict[str, dict[str, Any]] = {  # arguments of SGLang's engine
    OURS: {"quantization": "fp8moe"},
    "sglang": {"quantization": "fp8"},
    "sglang-deepgemm": {"quantization": "fp8", "moe_runner_backend": "deep_gemm"},
}
UNQUANTIZED = "unquantized"  # the engine of a twin, which is not timed
TWIN = {"disable_cuda_graph": True}
CELLS = "prefill 1x128,prefill 1x1024,prefill 4x2048,decode 1,decode 16,decode 64"
MOST_TOKENS = 8192  # of a step
PROMPTS, PROMPT_TOKENS, GENERATED = 32, 96, 32
MEMORY = 0.9  # of what is free when an engine starts; the size of its KV cache is fixed
KV_TOKENS = 32768


class Engine(RandomPrompts, Clock):
    """One engine, which has run each cell once."""

    def __init__(self, name: str, model: Path, cells: list[Cell], options: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine as Sglang

        super().__init__(model)
        self.engine = Sglang(
            model_path=str(model),
            skip_tokenizer_init=True,
            context_length=longest(cells) + PROMPT_TOKENS,
            chunked_prefill_size=MOST_TOKENS,
            max_prefill_tokens=MOST_TOKENS,
            max_total_tokens=KV_TOKENS,
            mem_fraction_static=MEMORY,
            disable_radix_cache=True,
            cuda_graph_bs_decode=sorted({cell.sequences for cell in cells if not cell.tokens} | {PROMPTS}),
            cuda_graph_bs_prefill=sorted({cell.sequences * cell.tokens for cell in cells if cell.tokens}),
            sleep_on_idle=True,
            log_level="info",
            **options,
            **ENGINES.get(name, TWIN),
        )
        for cell in cells:
            self.measure(cell)
        share_cores()

    def measure(self, cell: Cell) -> float:
        """Returns the `ms` of one round, on a host that is awake."""
        self.run(cell, SHORT)
        return super().measure(cell)

    def generate(self, prompts: int, prompt_tokens: int, tokens: int) -> float:
        ids = self.prompts(prompts, prompt_tokens)
        begin = time.perf_counter()
        outputs = self.engine.generate(input_ids=ids, sampling_params=greedy(tokens))
        ms = (time.perf_counter() - begin) * 1e3
        found = {(o["meta_info"]["prompt_tokens"], o["meta_info"]["completion_tokens"]) for o in outputs}
        if found != {(prompt_tokens, tokens)}:
            raise RuntimeError("a prompt was truncated, or got fewer tokens than requested")
        return ms

    def profile(self, cell: Cell) -> dict[str, Any]:
        """Returns how long the GPU is busy in one prefill or one decode step, and with which kernels."""
        found = summary(of_cell(self.profiled, self.run, cell))
        return {key: found[key] for key in ("gpu_busy_ms", "kernels_us")}

    def profiled(self, call: Callable[[], Any]) -> Times:
        """Returns the GPU's times of a call. The model runs in SGLang's scheduler, a process that profiles itself."""
        with tempfile.TemporaryDirectory() as folder:
            self.engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
            call()
            self.engine.stop_profile()
            (trace,) = Path(folder).glob("*.trace.json.gz")
            return times(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])

    def answers(self) -> dict[str, Any]:
        """For `agreement.compare`: the most likely token at each position of a prompt, and greedy answers."""
        outputs = self.engine.generate(
            input_ids=random_prompts(PROMPTS, PROMPT_TOKENS, self.vocab),
            sampling_params=greedy(GENERATED),
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        best = [[position[0] for position in o["meta_info"]["input_top_logprobs"][1:]] for o in outputs]
        return {
            "next_token": [[token for _, token, *_ in of] for of in best],
            "logprob": [[logprob for logprob, *_ in of] for of in best],
            "generated": [o["output_ids"][-GENERATED:] for o in outputs],
        }


def greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="block-FP8 checkpoints")
    parser.add_argument("--twins", type=Path, nargs="+", help="the same models unquantized, in the same order")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--cells", type=cells, default=CELLS, help="%(default)s")
    parser.add_argument("--rounds", type=count, default=9, help="timed rounds of each cell; %(default)s")
    parser.add_argument("--timeout", type=float, default=420, help="seconds for the start, and per call; %(default)s")
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="options")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each round")
    return parser


class Report:
    """The results file, rewritten as results come."""

    def __init__(self, out: Path | None, models: dict[Path, Engines]) -> None:
        self.out, self.models = out, models
        self.agreement: list[dict[str, Any]] = []
        packages = ("sglang", "sglang-kernel", "sgl-deep-gemm", "triton", "fp8moe-plugin")
        self.about = {name.replace("-", "_"): installed(name) for name in packages}

    def rows(self) -> list[dict[str, Any]]:
        return [row for engines in self.models.values() for row in engines.rows.values()]

    def write(self) -> None:
        if self.out is None:
            return
        described = {
            model.name: {
                "checkpoint": {key: read_config(model).get(key) for key in CONFIG_KEYS},
                "engines": engines.found,
            }
            for model, engines in self.models.items()
        }
        about = self.about | {"models": described}
        write_report(self.out, about | {"agreement": self.agreement, "rows": self.rows()})


def agree(model: Path, engines: Engines, timeout: float) -> list[dict[str, Any]]:
    """Returns how far each two of the engines agree."""
    answers = {}
    for name in list(engines.names):
        with engines.errors(name):
            answers[name] = engines.processes[name].call("answers", timeout=timeout)
    found: list[dict[str, Any]] = []
    for one, other in itertools.combinations(answers, 2):
        pair = {"model": model.name, "engine": one, "other": other}
        found.append(pair | {name: round(value, 4) for name, value in compare(answers[one], answers[other]).items()})
        progress(" ".join(f"{name} {value}" for name, value in found[-1].items()))
    return found


def measure(args: argparse.Namespace, models: dict[Path, Engines]) -> None:
    report = Report(args.out, models)
    begin = time.monotonic()
    for engines in models.values():
        for process in engines.processes.values():
            process.start()
    for engines in models.values():
        engines.wait_until_made(begin)
    report.write()
    for model, engines in models.items():
        report.agreement += agree(model, engines, args.timeout)
        report.write()
        if UNQUANTIZED in engines.names:
            engines.names.remove(UNQUANTIZED)
            engines.processes[UNQUANTIZED].kill()
    for number, engines in itertools.product(range(args.rounds), models.values()):
        engines.measure(args.cells, number)
        report.write()
    for engines, cell in itertools.product(models.values(), args.cells):
        engines.profile(cell)
        report.write()


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.twins and len(args.twins) != len(args.models):
        parser.error("--twins takes one checkpoint for each of --models, in their order")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the results so far are printed
    models: dict[Path, Engines] = {}
    for model, twin in itertools.zip_longest(args.models, args.twins or []):
        folders = dict.fromkeys(args.engines, model) | ({UNQUANTIZED: twin} if twin else {})
        makes = {name: partial(Engine, name, of, args.cells, dict(args.options)) for name, of in folders.items()}
        processes = {name: EngineProcess(make, {}) for name, make in makes.items()}
        models[model] = Engines(processes, model.name, args.timeout)
    try:
        measure(args, models)
    finally:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        for engines in models.values():
            engines.kill()
        rows = [row for engines in models.values() for row in engines.rows.values()]
        if rows:
            print(table(rows), flush=True)


if __name__ == "__main__":
    main()
