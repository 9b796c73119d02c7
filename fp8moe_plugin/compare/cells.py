"""Timed requests of an engine: prompts (prefill) and decoded sequences."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

PROMPT_TOKENS = 32  # of a sequence that is decoded
SHORT, STEPS = 8, 48  # tokens of a sequence before its steps are timed, and steps that are timed
# Of LLM. Works around two faults of vLLM 0.32 on CPUs, in BF16 models, too: the C++ kernel of rotary embeddings rotates
# DeepSeek's slices wrongly, and inductor moves a linear layer (onednn_mm) after the first reader of its output.
EAGER: dict[str, Any] = {"enforce_eager": True, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}


class Cell(NamedTuple):
    """One kind of request: `sequences` prompts of `tokens` tokens, read or, with `tokens` 0, decoded."""

    name: str
    sequences: int
    tokens: int


def graphs(cells: list[Cell]) -> dict[str, Any]:
    """Returns LLM's arguments for CUDA graphs of only the decoded batches: each captured size delays the start."""
    sizes = sorted({cell.sequences for cell in cells if not cell.tokens})
    return {"compilation_config": {"cudagraph_capture_sizes": sizes or [1]}}


def longest(cells: list[Cell]) -> int:
    """Returns the number of tokens of the longest sequence of these cells."""
    return max(PROMPT_TOKENS + SHORT + STEPS, *(cell.tokens + 1 for cell in cells))


def steady_ms(ends: list[float]) -> float:
    """Returns the milliseconds of a step: of the last `STEPS`, without the very last, which finishes the sequences.

    Raises:
        RuntimeError: there were fewer steps.
    """
    if len(ends) < STEPS + 2:
        raise RuntimeError(f"the engine took {len(ends)} steps; {STEPS + 2} or more are timed")
    return (ends[-2] - ends[-2 - STEPS]) / STEPS * 1e3


class Clock:
    """Times cells on an engine; a subclass starts it and overrides `generate`."""

    def generate(self, prompts: int, prompt_tokens: int, tokens: int) -> float:
        """Returns the milliseconds until each prompt has this many generated tokens."""
        raise NotImplementedError

    def run(self, cell: Cell, generated: int) -> float:
        """Returns the milliseconds of a prefill, or of `generated` tokens after a short prompt."""
        if cell.tokens:
            return self.generate(cell.sequences, cell.tokens, 1)
        return self.generate(cell.sequences, PROMPT_TOKENS, generated)

    def measure(self, cell: Cell) -> float:
        """Returns the milliseconds of a prefill, or of one decode step."""
        if cell.tokens:
            return self.run(cell, 1)
        return (self.run(cell, SHORT + STEPS) - self.run(cell, SHORT)) / STEPS


class VllmClock(Clock):
    """Times cells on `llm`; a subclass starts it and overrides `prompts`.

    Decode steps are timed inside one call. The difference between two calls has the spread of two prefills.
    """

    llm: Any

    def measure(self, cell: Cell) -> float:
        if cell.tokens:
            return self.run(cell, 1)
        with self.ends_of_steps() as ends:
            self.run(cell, SHORT + STEPS)
        return steady_ms(ends)

    @contextmanager
    def ends_of_steps(self) -> Iterator[list[float]]:
        """Fills the list with the time, in seconds, at which each step of the engine returns."""
        ends: list[float] = []
        step = self.llm.llm_engine.step

        def timed() -> Any:
            outputs = step()
            ends.append(time.perf_counter())
            return outputs

        with mock.patch.object(self.llm.llm_engine, "step", timed):
            yield ends

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Returns the ids of other prompts in each call."""
        raise NotImplementedError

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
