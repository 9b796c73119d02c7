"""Milliseconds per decode step in vLLM engines with different FP8 backends, ours and vLLM's own.

    python -m benchmarks.engine.decode --model DIR --out benchmarks/results/engine_decode-<date>.json
    python -m benchmarks.engine.decode --plot benchmarks/results/engine_decode-<date>.json  # needs matplotlib, no GPU

A round is two calls with the same number of prompts of 32 random tokens, all of them read in one step. The calls differ
by 64 generated tokens, so the difference of their times is the time of 64 decode steps. All engines exist at once and
take turns, one round each, since a host may be slow for seconds; an equal share of the GPU's memory must hold the
checkpoint. The engines are those of `benchmarks.engine.prefill`, with CUDA graphs for the measured batch sizes only.

`ready_s` counts from the start of an engine's process until it has run each batch size once, with the engines named
before it already on the GPU. `moe_ms` and `gpu_ms` come from a profile of 16 other steps, whose kernels are further
apart than without a profiler. `moe_ms` is the part of a step from the end of each router's top-k to the end of the last
kernel of the layer's experts; shared experts run during that time. It is null if kernels do not have the names in
`ROUTER` and `LAST`; the report lists the names with their times. `gpu_ms` is how long at least one kernel runs in a
step: within a few percent, the time of a step whose host keeps up with the GPU. The table is written to stdout, the
output of the engines to stderr.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.engine.prefill import ENGINES, engine_names, read_report
from benchmarks.engine.process import EngineError, EngineProcess
from benchmarks.engines import CONFIG_KEYS, DEFAULTS, read_config
from benchmarks.report import write_report
from fp8moe_plugin.bench.result import OURS, check_plot
from fp8moe_plugin.errors import UnsupportedError
from warmup.options import count

PROMPT_TOKENS, STEPS, PROFILED_STEPS = 32, 64, 16
SHORT = 8  # tokens of the shorter call
MEMORY = 0.9  # of the GPU, for all engines together
ROUTER = r"grouped_topk|topkGating"  # vLLM's, in all engines
# The last kernel of the experts; ours has two, the second one for small batches.
LAST = {OURS: r"^(combine|down_small_batch)$", "triton": r"moe_sum", "deepgemm": r"ep_gather"}
SHOWN = 25  # kernels of a step, those that take longest
PARTS = {"GPU": "gpu_ms", "MoE": "moe_ms"}  # of a step, in the table


class DecodeEngine:
    """One engine, which has run each batch size once."""

    def __init__(self, name: str, model: Path, batches: list[int], memory: float) -> None:
        import torch
        from vllm import LLM

        self.name = name
        self.llm = LLM(
            model=str(model),
            max_model_len=512,
            max_num_seqs=max(batches),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            gpu_memory_utilization=memory,
            compilation_config={"cudagraph_capture_sizes": batches},
            **ENGINES[name][0],
        )
        self.vocab = read_config(model)["vocab_size"]
        self.generator = torch.Generator().manual_seed(1)
        for batch in batches:
            self.generate(batch, SHORT)

    def generate(self, batch: int, tokens: int) -> float:
        """Seconds until each prompt of a batch has so many tokens."""
        import torch
        from vllm import SamplingParams, TokensPrompt

        ids = torch.randint(10, self.vocab, (batch, PROMPT_TOKENS), generator=self.generator).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if any(len(o.outputs[0].token_ids) != tokens for o in outputs):
            raise RuntimeError("a prompt got fewer tokens than requested")
        return seconds

    def step_ms(self, batch: int) -> float:
        return (self.generate(batch, SHORT + STEPS) - self.generate(batch, SHORT)) / STEPS * 1e3

    def profile(self, batch: int) -> dict[str, Any]:
        """The MoE part of a step and the times of its kernels, from the difference of two profiles."""
        traces = [
            kernels_of(lambda tokens=tokens: self.generate(batch, tokens)) for tokens in (SHORT, SHORT + PROFILED_STEPS)
        ]
        sums = [collections.Counter[str](), collections.Counter[str]()]
        for trace, total in zip(traces, sums, strict=True):
            for kernel in trace:
                total[kernel["name"]] += kernel["dur"]
        per_step = {kernel: (sums[1][kernel] - sums[0][kernel]) / PROFILED_STEPS for kernel in sums[1]}
        longest = sorted(per_step.items(), key=lambda item: -item[1])[:SHOWN]
        moe = [moe_us(trace, LAST[self.name]) for trace in traces]
        part = None if None in moe else round((moe[1] - moe[0]) / PROFILED_STEPS / 1e3, 4)  # type: ignore[operator]
        busy = (busy_us(traces[1]) - busy_us(traces[0])) / PROFILED_STEPS / 1e3
        return {
            "gpu_ms": round(busy, 4),
            "moe_ms": part,
            "kernels_us": {kernel[:120]: round(us, 2) for kernel, us in longest},
        }


def kernels_of(call: Any) -> list[dict[str, Any]]:
    """The kernels that a call runs on the GPU, in order of their start."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])


def busy_us(kernels: list[dict[str, Any]]) -> float:
    """How long at least one of the kernels runs; they are sorted by their start."""
    busy, until = 0.0, 0.0
    for kernel in kernels:
        end = kernel["ts"] + kernel["dur"]
        busy += max(0.0, end - max(kernel["ts"], until))
        until = max(until, end)
    return busy


def moe_us(kernels: list[dict[str, Any]], last: str) -> float | None:
    """Time from the end of each router's kernel to the end of the next `last`, summed; None if a layer has no end."""
    spans, begin = [], None
    for kernel in kernels:
        end = kernel["ts"] + kernel["dur"]
        if re.search(ROUTER, kernel["name"]):
            begin = end
        elif begin is not None and re.search(last, kernel["name"]):
            spans.append(end - begin)
            begin = None
    return sum(spans) if spans and begin is None else None


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    parts = [name.ljust(9)]
    for batch, row in found.get("batches", {}).items():
        profiled = [f"{part} {row[key]:.3f}" for part, key in PARTS.items() if row.get(key) is not None]
        parts.append(f"{batch}: {row['ms']:.3f} ms" + (f" ({', '.join(profiled)})" if profiled else ""))
    if "error" in found:
        parts.append(found["error"])
    elif "ready_s" in found:
        parts.append(f"ready after {found['ready_s']:.0f} s")
    return "  ".join(parts)


def plot(report: Path) -> None:
    """Plot milliseconds per step and, dashed, its MoE part by batch size, to an .svg next to the report."""
    check_plot(report.with_suffix(".svg"))
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot nothing looks for a display

    results = read_report(report)
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="sequences in the batch", ylabel="milliseconds a decode step")
    for color, (name, found) in zip(itertools.cycle(("C0", "C1", "C2")), results["engines"].items()):
        if "error" in found:
            continue
        batches = [int(batch) for batch in found["batches"]]
        rows = list(found["batches"].values())
        axes.plot(batches, [row["ms"] for row in rows], "o-", color=color, label=name)
        if all(row["moe_ms"] is not None for row in rows):
            axes.plot(batches, [row["moe_ms"] for row in rows], "--", color=color, label=f"{name}, MoE layers")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{results['checkpoint']['name']}, vLLM {results['vllm']}, CUDA graphs")
    with rc_context({"svg.hashsalt": report.stem}):  # so that the same report gives the same file
        figure.savefig(report.with_suffix(".svg"), metadata={"Date": None})


class Engines:
    """The engines that are compared, each in its own process, on one GPU; `found` holds their results."""

    def __init__(self, names: list[str], model: Path, batches: list[int], rounds: int, timeout: float) -> None:
        self.names = list(names)  # engines that have not failed, in the order of their turns
        self.memory = MEMORY / len(names)
        self.model, self.batches, self.rounds, self.timeout = model, batches, rounds, timeout
        self.found: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, EngineProcess] = {}

    def start(self, name: str) -> None:
        begin = time.monotonic()
        make = partial(DecodeEngine, name, self.model, self.batches, self.memory)
        defaults = {key: value for key, value in DEFAULTS.items() if key not in os.environ}
        self.found[name] = {}
        self.processes[name] = EngineProcess(make, defaults | ENGINES[name][1])
        with self.errors(name):
            self.processes[name].start()
            self.processes[name].wait_until_made(self.timeout)
            self.found[name] |= {"ready_s": round(time.monotonic() - begin, 1), "batches": {}}

    def measure(self, batch: int) -> None:
        """Time the steps of the engines in turn, one round each, then profile them."""
        for _ in range(self.rounds):
            for name in list(self.names):
                with self.errors(name):
                    self.time_steps(name, batch)
            self.names = self.names[1:] + self.names[:1]  # so that each engine comes first in turn
        for name in list(self.names):
            with self.errors(name):
                self.found[name]["batches"][str(batch)] |= self.call(name, "profile", batch)

    def time_steps(self, name: str, batch: int) -> None:
        ms = self.call(name, "step_ms", batch)
        row = self.found[name]["batches"].setdefault(str(batch), {"ms": ms, "rounds": []})
        row["rounds"].append(round(ms, 4))
        row["ms"] = round(statistics.median(row["rounds"]), 4)

    def call(self, name: str, method: str, batch: int) -> Any:
        return self.processes[name].call(method, batch, timeout=self.timeout)

    @contextlib.contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Drop an engine that fails; the others continue."""
        try:
            yield
        except EngineError as error:
            self.found[name]["error"] = str(error)
            self.names.remove(name)
            self.processes[name].kill()

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def batch_sizes(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="folder of a block-FP8 MoE checkpoint")
    what.add_argument("--plot", type=Path, metavar="REPORT", help="draw an earlier report, as .svg next to it")
    parser.add_argument("--engines", type=engine_names, default=",".join(ENGINES), help="%(default)s")
    parser.add_argument("--batches", type=batch_sizes, default="1,8,64,256", help="sequences; %(default)s")
    parser.add_argument("--rounds", type=count, default=11, help="timed rounds of each engine; %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=400, help="seconds for an engine's start, and for each round; %(default)s"
    )
    parser.add_argument("--out", type=Path, help="the report, rewritten after each batch size")
    args = parser.parse_args()
    if args.plot:
        try:
            return plot(args.plot)
        except UnsupportedError as error:
            parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the results so far are printed
    config = read_config(args.model)
    engines = Engines(args.engines, args.model, args.batches, args.rounds, args.timeout)
    results = {
        "vllm": metadata.version("vllm"),
        "fp8moe_plugin": metadata.version("fp8moe-plugin"),
        "checkpoint": {"name": args.model.resolve().name} | {key: config.get(key) for key in CONFIG_KEYS},
        "prompt_tokens": PROMPT_TOKENS,
        "engines": engines.found,
    }
    try:
        for name in args.engines:
            engines.start(name)
        for batch in args.batches:
            engines.measure(batch)
            if args.out:
                write_report(args.out, results)
    finally:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        engines.kill()
        for name, found in engines.found.items():
            print(line(name, found), flush=True)


if __name__ == "__main__":
    main()
