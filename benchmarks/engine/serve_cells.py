"""The cells of `benchmarks.engine.bench_serve`, and the client that measures them: that of `vllm bench serve`."""

import argparse
import asyncio
import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "model"  # its name in requests
MOST_CONCURRENT = 256  # requests that a server runs at a time
RATE_SECONDS = 30  # requests at a rate are sent for so long
DECODE_PROMPT, DECODE_ANSWER = 32, 65  # tokens of the requests that decode steps are timed with
ROUNDS = 3  # of a step; one more before them is not counted


@dataclass(frozen=True)
class Traffic:
    """Tokens of each prompt and of its answer."""

    name: str
    prompt: int
    answer: int


@dataclass(frozen=True)
class Cell:
    """Requests of one shape: `concurrency` of them at any time, or on average `rate` new ones per second.

    With `step`, `concurrency` requests start at once, and one of their figures is the time of an engine's step.
    """

    traffic: Traffic
    concurrency: int | None = None
    rate: float | None = None
    step: str | None = None  # name of the figure in milliseconds

    @property
    def load(self) -> dict[str, float]:
        """The fields of a row that say how many requests there are at a time."""
        return {name: value for name in ("concurrency", "rate") if (value := getattr(self, name))}

    @property
    def key(self) -> dict[str, Any]:
        """The fields of a row that say what was measured."""
        return {"cell": self.name} if self.step else {"traffic": self.traffic.name, **self.load}

    @property
    def name(self) -> str:
        if self.step:
            return self.traffic.name.format(self.concurrency)
        return f"{self.traffic.name}, {', '.join(f'{name} {value:g}' for name, value in self.load.items())}"

    def requests(self, waves: int) -> int:
        return waves * self.concurrency if self.concurrency else math.ceil(RATE_SECONDS * (self.rate or 0))


class CellError(Exception):
    """Requests of a cell failed, or had another length than its traffic."""


def parse_cells(text: str) -> list[Cell]:
    """Parse cells of one traffic, such as `8k/1k@1,16,0.5/s`, or steps, such as `decode@1,64` or `prefill@4x2048`.

    Raises:
        ArgumentTypeError: these are no cells.
    """
    if steps := parse_steps(text):
        return steps
    found = re.fullmatch(r"(([1-9]\d*)(k?)/([1-9]\d*)(k?))@(.+)", text)
    loads = (
        [re.fullmatch(r"([1-9]\d*)|((?=.*[1-9])\d+(?:\.\d+)?)/s", load) for load in found[6].split(",")]
        if found
        else []
    )
    if not found or not all(loads):
        raise argparse.ArgumentTypeError(
            f"no such cells: {text!r}; write 8k/1k@1,16 or 1000/100@0.5/s,2/s, decode@1 or prefill@4x2048"
        )
    prompt, answer = (int(found[i]) * (1024 if found[i + 1] else 1) for i in (2, 4))
    traffic = Traffic(found[1], prompt, answer)
    return [Cell(traffic, int(load[1])) if load[1] else Cell(traffic, rate=float(load[2])) for load in loads if load]


def parse_steps(text: str) -> list[Cell]:
    """Returns the steps that `text` names, none if it names none."""
    kind, _, sizes = text.partition("@")
    if kind == "decode" and re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", sizes):
        traffic = Traffic("decode {}", DECODE_PROMPT, DECODE_ANSWER)
        return [Cell(traffic, int(size), step="tpot_ms") for size in sizes.split(",")]
    if kind == "prefill" and re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", sizes):
        pairs = [map(int, size.split("x")) for size in sizes.split(",")]
        return [Cell(Traffic(f"prefill {{}}x{n}", n, 1), prompts, step="all_ms") for prompts, n in pairs]
    return []


def client_options(address: str, tokenizer: Path, cell: Cell, requests: int) -> list[str]:
    """Returns the options of `vllm bench serve`."""
    options = ["--backend", "openai", "--base-url", address, "--model", MODEL, "--tokenizer", str(tokenizer)]
    options += ["--dataset-name", "random", "--num-prompts", str(requests), "--temperature", "0", "--disable-tqdm"]
    options += ["--save-detailed"]  # the result has the error of each request
    options += ["--random-input-len", str(cell.traffic.prompt), "--random-output-len", str(cell.traffic.answer)]
    load = {"--max-concurrency": cell.concurrency, "--request-rate": cell.rate}
    return options + [text for name, value in load.items() if value for text in (name, str(value))]


def run_client(options: list[str], log: Path, timeout: float) -> dict[str, Any]:
    """Returns what `vllm bench serve` finds. It runs in this process, which imports vLLM only once.

    Raises:
        TimeoutError: it takes longer than `timeout` seconds.
    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args(options)
    with log.open("a") as output, contextlib.redirect_stdout(output):
        found: dict[str, Any] = asyncio.run(asyncio.wait_for(main_async(arguments), timeout))
    return found


def measure(address: str, tokenizer: Path, cell: Cell, requests: int, log: Path, timeout: float) -> dict[str, float]:
    """Returns the figures of one cell on one server; the client writes to `log`.

    Raises:
        CellError: the server does not answer, a request failed, or a prompt or an answer has another length than the
            traffic's.
        TimeoutError: it takes longer than `timeout` seconds.
    """
    try:
        found = run_client(client_options(address, tokenizer, cell, requests), log, timeout)
    except ValueError as error:  # the client's first request failed
        raise CellError(f"{cell.name}: {error} The client's output is in {log}.") from error
    done = found["completed"], found["total_input_tokens"], found["total_output_tokens"]
    expected = requests, requests * cell.traffic.prompt, requests * cell.traffic.answer
    if done != expected:
        raise CellError(
            f"{cell.name}: requests, their tokens and those of the answers are {done} instead of {expected}. "
            f"{next(filter(None, found['errors']), '')} The client's output is in {log}."
        )
    figures = {"seconds": found["duration"], "all_ms": 1e3 * found["duration"]}
    figures |= {"tokens_per_s": found["output_throughput"], "total_tokens_per_s": found["total_token_throughput"]}
    for name in ("ttft", "tpot"):
        figures |= {f"{name}_ms": found[f"median_{name}_ms"], f"{name}_ms_p99": found[f"p99_{name}_ms"]}
    return {"requests": requests} | {name: round(float(value), 3) for name, value in figures.items()}
