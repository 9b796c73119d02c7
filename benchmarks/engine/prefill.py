"""Prompt tokens per second in vLLM engines with different FP8 backends, ours and vLLM's own.

    python -m benchmarks.engine.prefill --model DIR --out benchmarks/results/engine_prefill-<date>.json
    python -m benchmarks.engine.prefill --plot benchmarks/results/engine_prefill-<date>.json  # needs matplotlib, no GPU

A round is 16 prompts of 2048 random tokens with one generated token each, timed from handing them to the engine to its
last answer, without a prefix cache and after one round of warm-up. Each engine has its own process, with CUDA graphs
and torch.compile, and runs the model in that process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that all prompts of a round
are there before its first step and every step has --max-num-batched-tokens tokens. `triton` and `deepgemm` run as
`--quantization fp8` does with that MoE backend: dense layers are CUTLASS's and DeepGEMM's, and DeepGEMM's scales of
activations are powers of two.
"""

import argparse
import json
import os
import signal
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.engines import CONFIG_KEYS, DEFAULTS, in_own_process, read_config, run_and_answer
from benchmarks.engines import ENGINES as ALL_ENGINES
from benchmarks.report import write_report
from fp8moe_plugin.bench.result import OURS, check_plot
from fp8moe_plugin.errors import UnsupportedError

PROMPTS, PROMPT_TOKENS = 16, 2048
ENGINES = {  # arguments of LLM, environment
    OURS: ALL_ENGINES["fp8moe"],
    "triton": ALL_ENGINES["triton default"],
    "deepgemm": ALL_ENGINES["deep_gemm default"],
}


def run_engine(args: argparse.Namespace) -> dict[str, Any]:
    """The rounds of one engine, in this process."""
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    start = time.monotonic()
    arguments, _ = ENGINES[args.run]
    llm = LLM(
        model=str(args.model),
        max_model_len=PROMPT_TOKENS + 16,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        **arguments,
    )
    ready = time.monotonic() - start
    generator = torch.Generator().manual_seed(1)
    vocab = read_config(args.model)["vocab_size"]
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    rounds = []
    for _ in range(1 + args.rounds):
        ids = torch.randint(10, vocab, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
        prompts = [TokensPrompt(prompt_token_ids=i) for i in ids]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append(PROMPTS * PROMPT_TOKENS / (time.perf_counter() - begin))
        if any(len(o.prompt_token_ids) != PROMPT_TOKENS or len(o.outputs[0].token_ids) != 1 for o in outputs):
            raise RuntimeError("a prompt was truncated, or got no token")
    warm_up, *timed = [round(r, 1) for r in rounds]
    median = round(statistics.median(timed), 1)
    return {"tokens_per_s": median, "rounds": timed, "warm_up_round": warm_up, "ready_s": round(ready, 1)}


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in found:
        return f"{name:9} {found['error']}"
    rounds = " ".join(f"{r:.0f}" for r in found["rounds"])
    return f"{name:9} {found['tokens_per_s']:9.0f} tokens/s, rounds {rounds}, ready after {found['ready_s']:.0f} s"


def finished(engines: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: found for name, found in engines.items() if "error" not in found}


def ours_over_best_peer(engines: dict[str, dict[str, Any]]) -> float | None:
    speeds = {name: found["tokens_per_s"] for name, found in finished(engines).items()}
    ours = speeds.pop(OURS, None)
    return ours / max(speeds.values()) if ours and speeds else None


def read_report(path: Path) -> dict[str, Any]:
    """Read an earlier report.

    Raises:
        UnsupportedError: this is not a report, or no engine of it finished.
    """
    try:
        results: dict[str, Any] = json.loads(path.read_text())
        done = finished(results["engines"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedError(f"{path} is not a report on engines: {error!r}.") from None
    if not done:
        raise UnsupportedError(f"No engine of {path} finished, so there is nothing to draw.")
    return results


def plot(report: Path) -> None:
    """Plot a bar for the median of each engine and a dot for each round, to an .svg next to the report."""
    check_plot(report.with_suffix(".svg"))
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot nothing looks for a display

    results = read_report(report)
    engines = finished(results["engines"])
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot(ylabel="prompt tokens per second")
    bars = axes.bar(list(engines), [found["tokens_per_s"] for found in engines.values()], width=0.6)
    axes.bar_label(bars, fmt="{:,.0f}", label_type="center", color="white")
    for name, found in engines.items():
        axes.plot([name] * len(found["rounds"]), found["rounds"], "k.", alpha=0.6)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    work = f"{results['prompts']} prompts of {results['prompt_tokens']} tokens"
    work += f", steps of up to {results['max_num_batched_tokens']}"
    axes.set_title(f"{results['checkpoint']['name']}, vLLM {results['vllm']}\n{work}")
    with rc_context({"svg.hashsalt": report.stem}):  # so that the same report gives the same file
        figure.savefig(report.with_suffix(".svg"), metadata={"Date": None})


def engine_names(text: str) -> list[str]:
    """Parse the argument that names engines of `ENGINES`.

    Raises:
        ArgumentTypeError: a name is unknown, or occurs twice.
    """
    names = text.split(",")
    if unknown := set(names) - set(ENGINES):
        raise argparse.ArgumentTypeError(
            f"no such engine: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}"
        )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"an engine occurs twice: {text}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="folder of a block-FP8 MoE checkpoint")
    what.add_argument("--plot", type=Path, metavar="REPORT", help="draw an earlier report, as .svg next to it")
    parser.add_argument("--engines", type=engine_names, default=",".join(ENGINES))
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--timeout", type=float, default=400, help="seconds per engine")
    parser.add_argument("--out", type=Path, help="the report, rewritten after each engine")
    parser.add_argument("--run", choices=ENGINES, help="run one engine in this process, and write its rounds to --out")
    args = parser.parse_args()
    if args.plot:
        try:
            return plot(args.plot)
        except UnsupportedError as error:
            parser.error(str(error))
    if args.run:
        run_and_answer(lambda: run_engine(args), args.out)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this process
    config = read_config(args.model)
    engines: dict[str, dict[str, Any]] = {}
    results = {
        "vllm": metadata.version("vllm"),
        "fp8moe_plugin": metadata.version("fp8moe-plugin"),
        "checkpoint": {"name": args.model.resolve().name} | {key: config.get(key) for key in CONFIG_KEYS},
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "engines": engines,
    }
    for name in args.engines:
        options = {
            "--model": args.model,
            "--rounds": args.rounds,
            "--max-num-batched-tokens": args.max_num_batched_tokens,
        }
        engines[name] = in_own_process(
            "benchmarks.engine.prefill", options, name, args.timeout, DEFAULTS | os.environ | ENGINES[name][1]
        )
        print(line(name, engines[name]), flush=True)
        if args.out:
            write_report(args.out, results)
    if ratio := ours_over_best_peer(engines):
        print(f"{OURS} / best peer: x{ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
