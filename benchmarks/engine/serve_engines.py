"""The servers of `benchmarks.engine.bench_serve`: those of `vllm serve`, several at once on one GPU."""

import contextlib
import importlib
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.checkpoints.tokenizer import write_word_tokenizer
from benchmarks.engine import e2e_engine
from benchmarks.engine.engine_e2e import MEMORY
from benchmarks.engine.serve_cells import MODEL, MOST_CONCURRENT, Cell, CellError, Traffic, measure
from benchmarks.engine.serve_demo import DemoError, free_port, log_tail, server, vllm_command, wait_until_ready
from benchmarks.engines import read_config

STEP_TOKENS = 8192
WARM_UP_REQUESTS, WARM_UP_ANSWER = 32, 8  # of each traffic, before a server is measured


@dataclass(frozen=True)
class Engine:
    """What is before and after `vllm serve MODEL` in a shell."""

    variables: dict[str, str]
    options: list[str]

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.options])


def parse_engine(text: str) -> Engine:
    """Parse variables and options, as `str` of an engine has them."""
    words = shlex.split(text)
    count = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    return Engine(dict(word.split("=", 1) for word in words[:count]), words[count:])


def options(arguments: dict[str, object]) -> list[str]:
    """Returns arguments of vLLM's `LLM` as options of its server."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in arguments.items())
    return [
        text
        for name, value in pairs
        for text in ([name] if value is True else [name, value if isinstance(value, str) else json.dumps(value)])
    ]


ENGINES = {name: Engine(variables, options(found)) for name, (found, variables) in e2e_engine.ENGINES.items()}


@dataclass(frozen=True)
class Settings:
    """How all servers of a run are started, and until when they are measured."""

    model: Path
    options: list[str]  # of this model
    traffic: list[Traffic]
    folder: Path  # of logs, caches and the tokenizer
    gpus: int  # of each server
    kv_gib: int | None  # None: the servers have the GPU to themselves
    deadline: float  # in seconds of `time.monotonic`

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def command(self, name: str, engine: Engine, servers: int) -> tuple[list[str], dict[str, str]]:
        """Returns the command of one of `servers` servers, and its environment variables."""
        on_gpu = torch.cuda.is_available()
        command, environment = vllm_command(str(self.model), on_gpu)
        longest = max(traffic.prompt + traffic.answer for traffic in self.traffic)
        command += ["--served-model-name", MODEL, "--tokenizer", str(self.tokenizer), "--max-model-len", str(longest)]
        command += ["--max-num-seqs", str(MOST_CONCURRENT), "--max-num-batched-tokens", str(STEP_TOKENS)]
        command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        command += ["--tensor-parallel-size", str(self.gpus)]
        if on_gpu:
            command += ["--gpu-memory-utilization", str(round(MEMORY / servers, 3))]
            command += ["--kv-cache-memory-bytes", str(self.kv_gib << 30)] if self.kv_gib else []
        environment |= {"VLLM_CACHE_ROOT": str(self.folder / "cache" / name)}
        return [*command, *self.options, *engine.options], environment | engine.variables


class Servers:
    """Servers that are ready and have answered requests of each traffic."""

    def __init__(self, settings: Settings, addresses: dict[str, str]) -> None:
        self.settings, self.addresses = settings, addresses

    def measure(self, name: str, cell: Cell, requests: int) -> dict[str, float]:
        settings = self.settings
        log = settings.log(f"{name}-client")
        with log_shown(settings.log(name)):
            return measure(self.addresses[name], settings.tokenizer, cell, requests, log, settings.seconds_left())

    def warm_up(self) -> None:
        for name in self.addresses:
            for traffic in self.settings.traffic:
                short = Traffic(traffic.name, traffic.prompt, WARM_UP_ANSWER)
                self.measure(name, Cell(short, concurrency=WARM_UP_REQUESTS), WARM_UP_REQUESTS)


@contextlib.contextmanager
def log_shown(log: Path) -> Iterator[None]:
    """Print the end of a server's log before an error goes on."""
    try:
        yield
    except (DemoError, CellError):
        print(f"{log_tail(log)}\nThe server's whole log is {log}.", flush=True)
        raise


@contextlib.contextmanager
def started(settings: Settings, engines: dict[str, Engine]) -> Iterator[Servers]:
    """Servers of these engines, which start at the same time and have ended when this context ends.

    Raises:
        DemoError: a server ended, or was not ready in time.
    """
    settings.tokenizer.mkdir(parents=True, exist_ok=True)
    write_word_tokenizer(settings.tokenizer, read_config(settings.model)["vocab_size"])
    shutil.copy(settings.model / "config.json", settings.tokenizer)  # transformers looks for the kind of model
    processes: dict[str, subprocess.Popen[bytes]] = {}
    addresses: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, engine in engines.items():
            port = free_port()
            command, environment = settings.command(name, engine, len(engines))
            command += ["--host", "127.0.0.1", "--port", str(port)]
            processes[name] = stack.enter_context(server(command, environment, settings.log(name)))
            addresses[name] = f"http://127.0.0.1:{port}"
        importlib.import_module("vllm.benchmarks.serve")  # takes ten seconds, in which the servers start
        for name, process in processes.items():
            with log_shown(settings.log(name)):
                wait_until_ready(process, addresses[name], settings.log(name), settings.seconds_left())
        servers = Servers(settings, addresses)
        servers.warm_up()
        yield servers
