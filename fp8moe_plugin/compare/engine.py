"""A vLLM engine that computes the log-probabilities of a text and is timed on it, in a process of its own."""

from typing import Any

import numpy as np

from fp8moe_plugin.compare.cells import SHORT, Cell, VllmClock
from fp8moe_plugin.compare.intervals import Ids, Reading
from fp8moe_plugin.errors import UnsupportedError

WINDOW, MOST_WINDOWS = 512, 64  # tokens; of a text
READY = "compare: this engine is ready"  # in its log
LONGEST_TOKEN = 16  # characters, on average over a text, which is truncated accordingly


class Engine(VllmClock):
    """One engine that has run each cell once, on prompts from the text.

    Raises `UnsupportedError` if the text has fewer than two windows.
    """

    def __init__(self, arguments: dict[str, Any], text: str, cells: list[Cell]) -> None:
        """
        Args:
            arguments: of vLLM's LLM.
        """
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.ids = token_ids(self.llm.get_tokenizer(), text)
        self.generator = np.random.default_rng(0)
        for cell in cells:
            self.run(cell, SHORT)
        print(READY, flush=True)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        begins = self.generator.integers(len(self.ids) - tokens + 1, size=count)
        return [self.ids[begin : begin + tokens].tolist() for begin in begins]

    def read(self, listed: int) -> Reading:
        """Returns the engine's reading of the text, with the `listed` most likely tokens at each position."""
        whole = len(self.ids) // WINDOW
        return read(self.llm, self.ids[: whole * WINDOW].reshape(whole, WINDOW), listed)


def token_ids(tokenizer: Any, text: str) -> Ids:
    """Returns the first tokens of a text, at most `MOST_WINDOWS` windows of them.

    Raises:
        UnsupportedError: the text has fewer than two windows.
    """
    cut = text[: LONGEST_TOKEN * MOST_WINDOWS * WINDOW]
    ids = np.array(tokenizer.encode(cut, add_special_tokens=False)[: MOST_WINDOWS * WINDOW])
    if len(ids) < 2 * WINDOW:
        raise UnsupportedError(
            f"The text has {len(ids)} tokens, and {2 * WINDOW} are needed at least. Give a longer text."
        )
    return ids


def read(llm: Any, windows: Ids, listed: int) -> Reading:
    """Returns the reading of windows [n, length] of token ids by an engine with `max_logprobs` of at least `listed`.

    Raises:
        RuntimeError: a log-probability of a token of the text is not finite.
    """
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=listed, flat_logprobs=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in windows.tolist()], sampling, use_tqdm=False)
    # Nothing is listed at the first token, and 1 + listed at each of the others.
    shape = (len(windows), windows.shape[1] - 1, 1 + listed)
    tokens = np.array([output.prompt_logprobs.token_ids for output in outputs], np.int32).reshape(shape)
    logprobs = np.array([output.prompt_logprobs.logprobs for output in outputs], np.float32).reshape(shape)
    if not np.isfinite(logprobs[..., 0]).all():
        raise RuntimeError("the engine returned a log-probability that is not finite")
    return Reading(windows, tokens, logprobs)
