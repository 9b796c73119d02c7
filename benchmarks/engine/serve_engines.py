"""The servers of `benchmarks.engine.bench_serve`: vLLM's and SGLang's, several at once on one GPU."""

import contextlib
import importlib
import itertools
import json
import os
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
from benchmarks.engine.serve_demo import (
    DemoError,
    free_port,
    log_tail,
    server,
    sglang_command,
    vllm_command,
    wait_until_ready,
)
from benchmarks.engines import read_config
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from warmup.memory import cache_bytes

STEP_TOKENS = 8192
WARM_UP_REQUESTS, WARM_UP_ANSWER = (1, 32), 8  # of each traffic, before a server is measured
SGLANG = "sglang.launch_server"
SGLANG_PACKAGES = "sglang", "sglang-kernel", "sgl-deep-gemm"
VERSIONS = """
import json, sys
from importlib.metadata import distributions
names = {found.metadata["Name"]: found.version for found in distributions()}
print(json.dumps({name: names.get(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class Engine:
    """The variables and options of a server."""

    variables: dict[str, str]
    options: list[str]
    python: str | None = None  # runs SGLang's server; None: `vllm serve`

    @property
    def most_requests(self) -> int:
        """Requests that it runs at a time: each of vLLM's ranks of data parallelism has its own."""
        sizes = re.findall(r"--data-parallel-size[ =](\d+)", " ".join(self.options))
        return MOST_CONCURRENT * int(sizes[-1] if sizes and not self.python else 1)

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*variables, *([self.python, "-m", SGLANG] if self.python else []), *self.options])


def sglang_versions(engines: dict[str, Engine]) -> dict[str, str | None]:
    """Returns the versions of SGLang and its kernels, nothing without a server of SGLang.

    Raises:
        DemoError: there is no SGLang where an engine's Python runs.
    """
    versions: dict[str, str | None] = {}
    for engine in engines.values():
        if engine.python:
            command = [engine.python, "-c", VERSIONS, *SGLANG_PACKAGES]
            environment = os.environ | engine.variables
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise DemoError(f"{engine.python} does not run: {getattr(error, 'stderr', None) or error}") from error
            versions |= json.loads(done.stdout)
            if versions["sglang"] is None:
                raise DemoError(f"{engine.python} has no SGLang. Name its environment's Python, or set PYTHONPATH.")
    return versions


def parse_engine(text: str) -> Engine:
    """Parse variables and options, as `str` of an engine has them.

    Raises:
        ValueError: this is neither of vLLM's server nor of SGLang's.
    """
    words = shlex.split(text)
    count = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    variables, words = dict(word.split("=", 1) for word in words[:count]), words[count:]
    python = words[0] if words[1:3] == ["-m", SGLANG] else None
    if words and not python and not words[0].startswith("-"):
        raise ValueError(f"{words[0]!r} is no option. Begin with options of vllm serve, or PYTHON -m {SGLANG}")
    return Engine(variables, words[3:] if python else words, python)


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
    options: list[str]  # of this model under vLLM
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

    @property
    def longest(self) -> int:
        """The tokens of the longest request."""
        return max(traffic.prompt + traffic.answer for traffic in self.traffic)

    def command(self, name: str, engine: Engine, servers: int) -> tuple[list[str], dict[str, str]]:
        """Returns the command of one of `servers` servers, and its environment variables."""
        command, environment = self._sglang(engine.python) if engine.python else self._vllm(name, servers)
        return [*command, "--served-model-name", MODEL, *engine.options], environment | engine.variables

    def _vllm(self, name: str, servers: int) -> tuple[list[str], dict[str, str]]:
        on_gpu = torch.cuda.is_available()
        command, environment = vllm_command(str(self.model), on_gpu)
        command += ["--tokenizer", str(self.tokenizer), "--max-model-len", str(self.longest)]
        command += ["--max-num-seqs", str(MOST_CONCURRENT), "--max-num-batched-tokens", str(STEP_TOKENS)]
        command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        command += ["--tensor-parallel-size", str(self.gpus)]
        if on_gpu:
            command += ["--gpu-memory-utilization", str(round(MEMORY / servers, 3))]
            command += ["--kv-cache-memory-bytes", str(self.kv_gib << 30)] if self.kv_gib else []
        return [*command, *self.options], environment | {"VLLM_CACHE_ROOT": str(self.folder / "cache" / name)}

    def _sglang(self, python: str) -> tuple[list[str], dict[str, str]]:
        on_gpu = torch.cuda.is_available()
        (_, *command), environment = sglang_command(str(self.model), on_gpu)
        context = self.longest + 2  # or the last two tokens of an answer would be missing
        command += ["--tokenizer-path", str(self.tokenizer), "--context-length", str(context)]
        command += ["--max-running-requests", str(MOST_CONCURRENT)]
        command += ["--chunked-prefill-size", str(STEP_TOKENS), "--max-prefill-tokens", str(STEP_TOKENS)]
        command += ["--disable-radix-cache", "--log-level-http", "warning", "--tp-size", str(self.gpus)]
        if on_gpu:
            # A share of what is free at the start, where vLLM's is one of the whole GPU.
            command += ["--mem-fraction-static", str(MEMORY)]
            command += ["--max-total-tokens", str(self._kv_tokens(self.kv_gib))] if self.kv_gib else []
        return [python, *command], environment

    def _kv_tokens(self, gib: int) -> int:
        return (gib << 30) // cache_bytes(read_model(self.model), Parallel(tp=self.gpus), fp8=False)


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
            for traffic, requests in itertools.product(self.settings.traffic, WARM_UP_REQUESTS):
                short = Traffic(traffic.name, traffic.prompt, min(traffic.answer, WARM_UP_ANSWER))
                self.measure(name, Cell(short, concurrency=requests), requests)


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
