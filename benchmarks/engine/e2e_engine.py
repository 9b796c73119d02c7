"""The engines and the cells of `benchmarks.engine.engine_e2e`; an engine runs in a process of its own."""

import argparse
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.agreement import GENERATED, PROMPT_TOKENS, answers
from benchmarks.engine.cores import share_cores
from benchmarks.engine.profiles import of_cell, profiled, summary
from benchmarks.engines import DEFAULTS, read_config
from benchmarks.engines import ENGINES as ALL_ENGINES
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare.cells import EAGER, SHORT, Cell, VllmClock, graphs, longest

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
    kv_bytes: int = 4 << 30  # holds the 32768 tokens of the longest prefill, with 24 layers twice
    step_tokens: int = MAX_BATCHED_TOKENS
    eager: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of LLM


# Of Qwen3.5: the checkpoint has no weights of the vision tower, and vLLM's default for linear attention on Hopper needs
# FlashInfer.
QWEN3_5 = {"language_model_only": True, "gdn_prefill_backend": "triton"}
KINDS = {
    "qwen3": Kind("qwen3_moe", "qwen3-24layer"),
    "qwen3-48": Kind("qwen3_moe", "qwen3-48layer"),
    "dsv3": Kind("deepseek_v3", "dsv3-3layer", kv_bytes=1 << 29, step_tokens=16384),  # or three engines do not fit
    "dsv3-tp8": Kind("deepseek_v3", "dsv3-tp8-30layer", step_tokens=16384),
    # 256 sequences have 16 GiB of linear attention's states.
    "qwen3.5": Kind("qwen3_5_moe", "qwen3.5-35b", kv_bytes=22 << 30, step_tokens=16384, options=QWEN3_5),
    "tiny": Kind("qwen3_moe", "tiny", kv_bytes=1 << 28, eager=True),  # to try this program, also on a CPU
}


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


class RandomPrompts:
    """Prompts of random tokens for the `Clock` of a model."""

    def __init__(self, model: Path) -> None:
        self.vocab = read_config(model)["vocab_size"]
        self.generator = torch.Generator().manual_seed(1)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(10, self.vocab, (count, tokens), generator=self.generator).tolist()
        return ids


class Engine(RandomPrompts, VllmClock):
    """One engine, which has run each cell once."""

    def __init__(self, name: str, kind: str, model: Path, cells: list[Cell], memory: float) -> None:
        from vllm import LLM

        super().__init__(model)
        self.llm = LLM(
            model=str(model),
            max_model_len=max(longest(cells), PROMPT_TOKENS + GENERATED),
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=KINDS[kind].step_tokens,
            enable_prefix_caching=False,
            gpu_memory_utilization=memory,
            kv_cache_memory_bytes=KINDS[kind].kv_bytes,
            **(EAGER if KINDS[kind].eager else graphs(cells)),
            **KINDS[kind].options,
            **ENGINES[name][0],
        )
        for cell in cells:
            self.run(cell, SHORT)
        share_cores()

    def profile(self, cell: Cell) -> dict[str, Any]:
        """Returns what the profiler says about one prefill or one decode step."""
        return summary(of_cell(profiled, self.run, cell))

    def answers(self, count: int) -> dict[str, Any]:
        """Returns the most likely tokens of `count` prompts, for `agreement.compare`."""
        return answers(self.llm, self.vocab, count)


def environment(name: str) -> dict[str, str]:
    """Returns what is added to the environment of an engine's process; variables that are set keep their values."""
    cache = os.environ.get("VLLM_CACHE_ROOT", str(Path(tempfile.gettempdir(), "engine_e2e_cache")))
    defaults = {key: value for key, value in DEFAULTS.items() if key not in os.environ}
    return defaults | {"VLLM_CACHE_ROOT": f"{cache}/{name}"} | ENGINES[name][1]
