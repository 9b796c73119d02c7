"""The engines and the cells of `benchmarks.engine.engine_e2e`; an engine runs in a process of its own."""

import argparse
import os
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine.profiles import per_unit, profiled, summary
from benchmarks.engine.small_engines import EAGER
from benchmarks.engines import DEFAULTS, read_config
from benchmarks.engines import ENGINES as ALL_ENGINES
from fp8moe_plugin.bench.result import OURS

PROMPT_TOKENS = 32  # of a sequence that is decoded
SHORT, STEPS = 8, 48  # generated tokens of the shorter call, and by how many the longer one differs
PROFILED_PREFILLS, PROFILED_STEPS = 3, 16
MAX_BATCHED_TOKENS, MAX_SEQUENCES = 32768, 256
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # arguments of LLM, environment
    OURS: ALL_ENGINES["fp8moe"],
    "vllm": ({"quantization": "fp8"}, {}),
    "vllm-deepgemm": ({"quantization": "fp8"}, {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}),
    "triton": ({"quantization": "fp8", "moe_backend": "triton"}, {"VLLM_USE_DEEP_GEMM": "0"}),
}


@dataclass(frozen=True)
class Kind:
    """A model: the checkpoint's preset, and how its engines differ from those of other models."""

    family: str
    preset: str
    kv_bytes: int = 4 << 30  # holds the 32768 tokens of the longest prefill twice
    step_tokens: int = MAX_BATCHED_TOKENS
    eager: bool = False


KINDS = {
    "qwen3": Kind("qwen3_moe", "qwen3-24layer"),
    "dsv3": Kind("deepseek_v3", "dsv3-3layer", kv_bytes=1 << 29, step_tokens=16384),  # or three engines do not fit
    "tiny": Kind("qwen3_moe", "tiny", kv_bytes=1 << 28, eager=True),  # to try this program, also on a CPU
}


class Cell(NamedTuple):
    """One kind of request: `sequences` prompts of `tokens` tokens, read or, with `tokens` 0, decoded."""

    name: str
    sequences: int
    tokens: int


def parse_cell(text: str) -> Cell:
    """
    Raises:
        ArgumentTypeError: this is not the name of a cell.
    """
    found = re.fullmatch(r"prefill ([1-9]\d*)x([1-9]\d*)|decode ([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"no such cell: {text!r}; write 'prefill 4x2048' or 'decode 64'")
    sequences, tokens, decoded = (int(group or 0) for group in found.groups())
    if sequences * tokens > MAX_BATCHED_TOKENS or sequences + decoded > MAX_SEQUENCES:
        raise argparse.ArgumentTypeError(f"{text} does not fit into one step")
    return Cell(text, sequences or decoded, tokens)


def graphs(cells: list[Cell]) -> dict[str, Any]:
    """CUDA graphs of the decoded batches alone: DeepGEMM compiles kernels for seconds per captured size."""
    sizes = sorted({cell.sequences for cell in cells if not cell.tokens})
    return {"compilation_config": {"cudagraph_capture_sizes": sizes or [1]}}


class Clock:
    """Times cells on an engine; a subclass starts it and overrides `generate`."""

    def __init__(self, model: Path) -> None:
        self.vocab = read_config(model)["vocab_size"]
        self.generator = torch.Generator().manual_seed(1)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(10, self.vocab, (count, tokens), generator=self.generator).tolist()
        return ids

    def generate(self, prompts: int, prompt_tokens: int, tokens: int) -> float:
        """Milliseconds until each of the prompts has this many generated tokens."""
        raise NotImplementedError

    def run(self, cell: Cell, generated: int) -> float:
        """Milliseconds of a prefill, or of `generated` tokens after a short prompt."""
        if cell.tokens:
            return self.generate(cell.sequences, cell.tokens, 1)
        return self.generate(cell.sequences, PROMPT_TOKENS, generated)

    def measure(self, cell: Cell) -> float:
        """The `ms` of one round."""
        if cell.tokens:
            return self.run(cell, 1)
        return (self.run(cell, SHORT + STEPS) - self.run(cell, SHORT)) / STEPS


class Engine(Clock):
    """One engine, which has run each cell once."""

    def __init__(self, name: str, kind: str, model: Path, cells: list[Cell], memory: float) -> None:
        from vllm import LLM

        super().__init__(model)
        self.llm = LLM(
            model=str(model),
            max_model_len=longest(cells),
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=KINDS[kind].step_tokens,
            enable_prefix_caching=False,
            gpu_memory_utilization=memory,
            kv_cache_memory_bytes=KINDS[kind].kv_bytes,
            **(EAGER if KINDS[kind].eager else graphs(cells)),
            **ENGINES[name][0],
        )
        for cell in cells:
            self.run(cell, SHORT)

    def generate(self, prompts: int, prompt_tokens: int, tokens: int) -> float:
        from vllm import SamplingParams, TokensPrompt

        ids = self.prompts(prompts, prompt_tokens)
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], sampling, use_tqdm=False)
        ms = (time.perf_counter() - begin) * 1e3
        if any(len(o.prompt_token_ids) != prompt_tokens or len(o.outputs[0].token_ids) != tokens for o in outputs):
            raise RuntimeError("a prompt was truncated, or got fewer tokens than requested")
        return ms

    def profile(self, cell: Cell) -> dict[str, Any]:
        """What the profiler says about one prefill or one decode step."""

        profiled(lambda: self.run(cell, SHORT))  # the profiler's own first calls are slow
        if cell.tokens:
            prefills = profiled(lambda: [self.run(cell, 1) for _ in range(PROFILED_PREFILLS)])
            return summary(per_unit(prefills, Counter(), PROFILED_PREFILLS))
        shorter, longer = (profiled(partial(self.run, cell, SHORT + steps)) for steps in (0, PROFILED_STEPS))
        return summary(per_unit(longer, shorter, PROFILED_STEPS))


def longest(cells: list[Cell]) -> int:
    """The most tokens that a sequence of these cells reaches."""
    return max(PROMPT_TOKENS + SHORT + STEPS, *(cell.tokens + 1 for cell in cells))


def environment(name: str) -> dict[str, str]:
    """What is added to the environment of an engine's process; variables that are set keep their values."""
    cache = os.environ.get("VLLM_CACHE_ROOT", str(Path(tempfile.gettempdir(), "engine_e2e_cache")))
    defaults = {key: value for key, value in DEFAULTS.items() if key not in os.environ}
    return defaults | {"VLLM_CACHE_ROOT": f"{cache}/{name}"} | ENGINES[name][1]
