"""Checks that a model gives the same answers however it is stored and split, with vLLM engines of small checkpoints.

    python -m benchmarks.engine.splits --out benchmarks/results/engine_splits-<date>.json [--jobs 3]
    python -m benchmarks.engine.splits --list

Each case compares one engine with a reference engine, on small synthetic checkpoints that are written first.

- `bits`: all tokens and all log-probabilities are equal.
- `greedy`: where the reference's best token leads clearly, it is the engine's best token, too, and 9 of 10 positions
  are near. Ranks sum in another order than one GPU, and FP8 turns a low-order bit into a rounding of a whole
  activation, which may decide between likely tokens. The number of equal tokens is reported and not asserted, but no
  split may be further from the unquantized model (`twin`) than one GPU is.

Engines with `FP8MOE_EP=push` must have as many windows as they have kinds of layers. With expert load balancing they
answer while experts move.

Each engine has its own process: on GPUs with CUDA graphs for decode and without torch.compile, on CPUs eager. Cases
that need more GPUs than there are, are skipped; features that vLLM does not offer are reported as refused. The exit
status is 1 if a case failed.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from pydantic import BaseModel

from benchmarks.checkpoints.answers import (
    ALL,
    LARGEST_DIFFERENCE,
    Answers,
    ask,
    compare,
    equal_prefix,
    random_prompts,
    same_history,
)
from benchmarks.checkpoints.synthetic import write_checkpoint
from benchmarks.engine.placement import START_PLACED
from benchmarks.engine.replicas import joined, meet, rest
from benchmarks.engine.split_cases import CASES, ENGINES, EPLB, NOT_ON_CPUS, ON_GPU, REDUNDANT, Case, Engine, shapes
from benchmarks.engines import in_own_process, run_and_answer
from benchmarks.report import write_report
from fp8moe_plugin.compare.cells import EAGER
from warmup.__main__ import main as warmup
from warmup.report import installed

PROMPTS, PROMPT_TOKENS, GENERATED = 16, 48, 16
LIMITS = {"max_model_len": 256, "max_num_seqs": PROMPTS, "max_num_batched_tokens": 1024, "max_logprobs": ALL}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
# With a KV cache of fixed size vLLM does not measure the memory that other engines take.
DEVICE = {"compilation_config": GRAPHS, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2}
COMMON: dict[str, Any] = LIMITS | (DEVICE if ON_GPU else EAGER) | {"enable_prefix_caching": False}
# Importing this module initializes CUDA, after which a forked process cannot use it.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

SAME = {"bits": 1.0, "greedy": 0.97, "twin": 0.95}  # of the positions with a clear lead
CLEAR = 0.5  # of all positions
WORSE = 1.2  # times the reference's distance from the unquantized twin
ROUNDS_OF_MOVES = 8  # at most
# vLLM's messages for features that it lacks, such as DeepSeek's multi-token prediction over a pipeline in 0.25.1.
REFUSALS = ("Pipeline parallelism is not supported for this model", "load balancing is only supported on")


class EngineReport(BaseModel):
    """`weights_bytes`, `loading_peak_bytes`: GPU memory after and during loading, for engines on one GPU."""

    error: str | None = None
    ready_s: float | None = None
    weights_bytes: int | None = None
    loading_peak_bytes: int | None = None
    moved: int | None = None  # places whose expert has changed since the start
    moved_meanwhile: int | None = None  # while the engine answered
    misplaced: list[str] | None = None  # tensors that differ from the checkpoint's
    windows: list[list[int]] | None = None  # hidden size, experts per token and experts of each window


class CaseReport(BaseModel):
    """`difference`, `clear`, `same`: see `benchmarks.checkpoints.answers.Comparison`.

    `equal_best`: share of the positions with equal history where both have the same best token. `first_apart`: largest
    difference of log-probabilities of the reference's first tokens.
    """

    what: str
    engine: str
    reference: str
    check: str
    state: Literal["passed", "failed", "refused"] = "failed"
    problems: list[str] = []
    tokens: int | None = None
    equal_tokens: int | None = None  # before the first difference of an answer
    positions: int | None = None
    equal_positions: int | None = None  # all bits of the log-probabilities are equal, whatever precedes
    difference: float | None = None
    clear: float | None = None
    same: float | None = None
    equal_best: float | None = None
    first_apart: float | None = None
    from_twin: float | None = None
    reference_from_twin: float | None = None


# One engine, in its own process


def run_engine(name: str, checkpoints: Path) -> dict[str, Any]:
    """Returns the answers of one engine, or of its replica with the rank in the environment."""
    from vllm import LLM

    engine = ENGINES[name]
    start, found = time.monotonic(), dict[str, Any]()
    arguments = COMMON | engine.arguments
    if engine.draft:
        draft = {"model": str(checkpoints / engine.draft), "quantization": engine.arguments["quantization"]}
        arguments["speculative_config"] = arguments["speculative_config"] | draft
    with loading_measured(found) if ON_GPU and engine.gpus == 1 else contextlib.nullcontext():
        llm = LLM(model=str(checkpoints / engine.checkpoint), dtype="bfloat16", skip_tokenizer_init=True, **arguments)
    found["ready_s"] = round(time.monotonic() - start, 1)
    if engine.reloads:
        llm.collective_rpc("reload_weights")
    if engine.moves:
        found |= move_experts(llm, engine)
    elif engine.placed_as:
        llm.collective_rpc("stop_moving")
    mine = slice(int(os.environ.get("VLLM_DP_RANK", 0)), None, engine.replicas)
    found["answers"] = ask(llm, random_prompts(PROMPTS, PROMPT_TOKENS)[mine], GENERATED)
    rest(engine.replicas, "answered")  # before that, the steps of the other ranks need this engine
    if engine.moves or engine.placed_as:
        places = llm.collective_rpc("stop_moving")[0]
        if engine.moves:
            found["moved_meanwhile"] = differences(places, found["places"])
        found["misplaced"] = list(itertools.chain.from_iterable(llm.collective_rpc("misplaced")))
    if engine.windows:
        found["windows"] = llm.collective_rpc("windows")[0]
    meet(engine.replicas, "done")
    return found


@contextlib.contextmanager
def loading_measured(found: dict[str, Any]) -> Iterator[None]:
    """Record GPU memory after and during loading; the worker runs in this process."""
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model

    def measured(worker: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        load(worker, *args, **kwargs)
        found["weights_bytes"] = torch.cuda.memory_allocated() - before
        found["loading_peak_bytes"] = torch.cuda.max_memory_allocated() - before

    with mock.patch.object(Worker, "load_model", measured):
        yield


def move_experts(llm: Any, engine: Engine) -> dict[str, Any]:
    """Generate until vLLM has moved experts to places it could also load: no expert twice on a rank.

    An engine of one replica moves none from then on. Others go on: a replica cannot stop alone.
    """
    from vllm import SamplingParams, TokensPrompt

    experts = shapes()["deepseek"].experts
    start = [*range(experts), *range(REDUNDANT)]
    sampling = SamplingParams(temperature=0, max_tokens=2 * EPLB["step_interval"], ignore_eos=True, detokenize=False)
    for seed in range(1, ROUNDS_OF_MOVES + 1):
        prompts = random_prompts(PROMPTS, PROMPT_TOKENS, seed=seed)
        llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
        rest(engine.replicas, f"round {seed}")
        places = llm.collective_rpc("experts_in_places")[0]
        local = len(places) // engine.gpus
        of_ranks = [places[first : first + local] for first in range(0, len(places), local)]
        if places != start and all(len(set(rank)) == local for rank in of_ranks):
            if engine.replicas == 1:
                llm.collective_rpc("stop_moving")
            return {"places": places, "moved": differences(places, start)}
    raise RuntimeError(f"vLLM moved no experts to where it could load them in {ROUNDS_OF_MOVES} rounds: {places}")


def differences(now: list[int], then: list[int]) -> int:
    return sum(one != other for one, other in zip(now, then, strict=True))


# All engines of the selected cases


def start_engine(name: str, number: int, checkpoints: Path, timeout: float, others: dict[str, Future[Any]]) -> Any:
    """Returns the result of `run_engine`, or its `error`; replicas are joined."""
    engine = ENGINES[name]
    environment = os.environ | ENVIRONMENT | engine.environment
    if engine.placed_as:
        moved = others[engine.placed_as].result()
        if "error" in moved:
            return {"error": f"the engine {engine.placed_as} failed"}
        environment[START_PLACED] = json.dumps(moved["places"])
    if ON_GPU and engine.gpus == 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(
            ","
        )
        environment["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]
    elif not ON_GPU:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "auto" if engine.gpus == 1 else "0|1"
    start = functools.partial(in_own_process, "benchmarks.engine.splits", {"--checkpoints": checkpoints}, name, timeout)
    if engine.replicas == 1:
        found = start(environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    else:
        found = joined(engine.replicas, environment, start)
    done = textwrap.shorten(found["error"], 300) if "error" in found else f"ready after {found['ready_s']:.0f} s"
    print(f"{name}: {done}", flush=True)
    return found


def write_checkpoints(folder: Path, names: set[str]) -> None:
    """Write the checkpoints `<shape>-<kind>`, and compile their kernels, so that engines need not."""
    for name in sorted(names):
        shape, _, kind = name.rpartition("-")
        begin = time.monotonic()
        if kind == "converted":
            write_checkpoint(folder / f"{shape}-bf16", shapes()[shape], fp8=False)
            done = warmup(["convert", "--model", str(folder / f"{shape}-bf16"), "--out", str(folder / name)])
        else:
            write_checkpoint(folder / name, shapes()[shape], fp8=kind == "fp8")
            done = 0 if kind == "bf16" or not ON_GPU else warmup(["--model", str(folder / name)])
        if done:
            raise RuntimeError(f"warmup ended with status {done} for {name}")
        print(f"{name}: written in {time.monotonic() - begin:.1f} s", flush=True)


def check(case: Case, found: dict[str, dict[str, Any]]) -> CaseReport:
    report = CaseReport(what=case.what, engine=case.engine, reference=case.reference, check=case.check)
    errors = {name: found[name]["error"] for name in dict.fromkeys(case.engines()) if "error" in found[name]}
    if errors:
        report.problems = [f"{name}: {textwrap.shorten(error, 300)}" for name, error in errors.items()]
        report.state = "refused" if any(text in e for e in errors.values() for text in REFUSALS) else "failed"
        return report
    ours, reference = found[case.engine]["answers"], found[case.reference]["answers"]
    report.difference, report.clear, report.same = compare(ours, reference)
    count_equal(report, ours, reference)
    mine, theirs = same_history(ours, reference)
    report.equal_best = (mine.argmax(1) == theirs.argmax(1)).float().mean().item()
    report.first_apart = max(
        abs(one[0][tokens[0]] - other[0][tokens[0]])
        for one, other, tokens in zip(ours["generated"], reference["generated"], reference["tokens"], strict=True)
    )
    if case.check == "bits" and (report.equal_tokens, report.equal_positions) != (report.tokens, report.positions):
        report.problems.append("not all bits are equal")
    if report.difference > LARGEST_DIFFERENCE:
        report.problems.append(f"a tenth of the positions differ by more than {LARGEST_DIFFERENCE:.0%}")
    if report.same < SAME[case.check]:
        report.problems.append(f"under {SAME[case.check]:.0%} of the best tokens with a clear lead are the same")
    if report.clear < CLEAR:
        report.problems.append(f"under {CLEAR:.0%} of the best tokens lead clearly, so that the others say little")
    if case.twin:
        twin = found[case.twin]["answers"]
        report.from_twin, report.reference_from_twin = (
            compare(ours, twin).difference,
            compare(reference, twin).difference,
        )
        if report.from_twin > WORSE * report.reference_from_twin:
            report.problems.append(f"further from the unquantized model than {WORSE} times the reference")
    report.problems += [
        f"{name}: {found[name]['misplaced'][:3]}" for name in case.engines() if found[name].get("misplaced")
    ]
    report.problems += [problem for name in case.engines() if (problem := memory_problem(name, found[name]))]
    report.problems += [
        f"{name} has the windows {found[name]['windows']}, expected were {ENGINES[name].windows}"
        for name in case.engines()
        if len(found[name].get("windows", [])) != ENGINES[name].windows
    ]
    report.state = "failed" if report.problems else "passed"
    return report


def count_equal(report: CaseReport, ours: Answers, reference: Answers) -> None:
    pairs = list(zip(ours["tokens"], reference["tokens"], strict=True))
    report.tokens = sum(len(tokens) for tokens in ours["tokens"])
    report.equal_tokens = sum(equal_prefix(*pair) for pair in pairs)
    positions = [
        (mine, theirs)
        for key in ("prompts", "generated")
        for pair in zip(ours[key], reference[key], strict=True)
        for mine, theirs in zip(*pair, strict=True)
    ]
    report.positions, report.equal_positions = len(positions), sum(mine == theirs for mine, theirs in positions)


def memory_problem(name: str, found: dict[str, Any]) -> str | None:
    """Returns a complaint if loading an unquantized checkpoint took more memory than the FP8 model plus one layer."""
    engine = ENGINES[name]
    if engine.arguments.get("quantization") != "fp8moe" or not engine.checkpoint.endswith("-bf16") or not ON_GPU:
        return None
    shape = shapes()[engine.checkpoint.removesuffix("-bf16")]
    layer = 2 * shape.experts * 3 * shape.hidden * shape.moe_intermediate
    extra = found["loading_peak_bytes"] - found["weights_bytes"]
    return f"{name}: loading took {extra} bytes more than the model, a layer is {layer}" if extra >= layer else None


def row(name: str, report: CaseReport) -> str:
    """Returns a row of the table."""
    text = f"{name:13} {report.state:8}"
    if report.difference is not None:
        text += (
            f" tokens {report.equal_tokens}/{report.tokens}, equal bits {report.equal_positions}/{report.positions}, "
        )
        text += f"best {report.equal_best:.4f}, first tokens apart {report.first_apart:.4f}, "
        text += f"apart {report.difference:.4f}, clear leads kept {report.same:.4f} of {report.clear:.2f}"
    if report.from_twin is not None:
        text += f", from the twin {report.from_twin:.4f}, one GPU {report.reference_from_twin:.4f}"
    return "\n    ".join([f"{text}  ({report.what})", *report.problems])


def selected(names: str | None) -> dict[str, Case]:
    """Returns the requested cases, by default all that this machine has the GPUs for, or that vLLM supports on CPUs."""
    if names:
        return {name: CASES[name] for name in names.split(",")}
    gpus = torch.cuda.device_count() if ON_GPU else 2
    fit = {n: c for n, c in CASES.items() if all(ENGINES[e].gpus <= gpus for e in c.engines())}
    if not ON_GPU:
        for name in NOT_ON_CPUS:
            del fit[name]
    if left_out := [n for n in CASES if n not in fit]:
        why = "this machine lacks the GPUs" if ON_GPU else "vLLM on CPUs lacks a part"
        print(f"skipped, {why}: {', '.join(left_out)}", flush=True)
    return fit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="comma-separated; default: all that this machine has GPUs for")
    parser.add_argument("--list", action="store_true", help="the cases, and how many GPUs each needs")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time, spread over the GPUs")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each engine")
    parser.add_argument("--checkpoints", type=Path, help="folder for the checkpoints; default: a temporary one")
    parser.add_argument("--out", type=Path, help="the report, rewritten whenever an engine is done")
    parser.add_argument("--run", choices=ENGINES, help="run one engine in this process, and write its answers to --out")
    args = parser.parse_args()
    if args.list:
        for name, case in CASES.items():
            print(f"{name:13} {max(ENGINES[e].gpus for e in case.engines())} GPU  {case.check:6}  {case.what}")
        return 0
    if args.run:
        run_and_answer(
            lambda: run_engine(args.run, args.checkpoints), args.out, longest=2000
        )  # long enough for the search for `REFUSALS`
        return 0
    if unknown := set((args.cases or "").split(",")) - set(CASES) - {""}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this process
    cases, reports = selected(args.cases), dict[str, CaseReport]()
    with tempfile.TemporaryDirectory() as folder:
        for found in run_engines(cases, args.checkpoints or Path(folder), args.jobs, args.timeout):
            for name, case in cases.items():
                if name not in reports and found.keys() >= set(case.engines()):
                    reports[name] = check(case, found)
                    print(row(name, reports[name]), flush=True)
            if args.out:
                write_report(args.out, results(reports, found))
    return int(any(report.state == "failed" for report in reports.values()))


def run_engines(
    cases: dict[str, Case], checkpoints: Path, jobs: int, timeout: float
) -> Iterator[dict[str, dict[str, Any]]]:
    """Run the engines, and yield the results so far whenever one is done."""
    names = list(dict.fromkeys(itertools.chain.from_iterable(case.engines() for case in cases.values())))
    write_checkpoints(checkpoints, {c for name in names for c in (ENGINES[name].checkpoint, ENGINES[name].draft) if c})
    futures: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(jobs) as pool:  # an engine that starts with the placement of another one comes after it
        for number, name in enumerate(names):
            futures[name] = pool.submit(start_engine, name, number, checkpoints, timeout, futures)
        for _ in as_completed(futures.values()):
            yield {name: future.result() for name, future in futures.items() if future.done()}


def results(reports: dict[str, CaseReport], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    engines = {name: EngineReport.model_validate(result, extra="ignore") for name, result in found.items()}
    return {
        "gpus": torch.cuda.device_count(),
        "vllm": installed("vllm") or installed("vllm-cpu"),
        "fp8moe_plugin": metadata.version("fp8moe-plugin"),
        "shapes": {name: vars(shape) for name, shape in shapes().items()},
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "generated_tokens": GENERATED,
        "cases": {name: report.model_dump(exclude_none=True) for name, report in reports.items()},
        "engines": {name: report.model_dump(exclude_none=True) for name, report in engines.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
