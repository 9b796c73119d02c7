"""A running server of vLLM or SGLang, with OpenAI's completions, that reads a text and is timed on it."""

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fp8moe_plugin.compare.cells import SHORT, STEPS, Cell, Clock
from fp8moe_plugin.compare.engine import MOST_WINDOWS, WINDOW
from fp8moe_plugin.compare.intervals import Reading
from fp8moe_plugin.compare.process import EngineError
from fp8moe_plugin.compare.task import Scores, evaluate
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown_text

LISTED = 20  # most likely tokens at each position; vLLM serves no more by default
CHARACTERS = 4  # per token, approximately: the server tokenizes the text
READERS = 8  # windows in flight
TIMEOUT_S = 600
MOST_ANSWER_BYTES, MOST_ERROR_BYTES = 64 << 20, 1 << 16
NO_TOKEN, NO_LOGPROB = -1, -9999.0  # fill lists that have fewer tokens
FRAGMENT = "\ufffd"  # in the text of an incomplete character, which several tokens may share
OTHER_SERVER = "Give the URL of a server of vLLM or SGLang, without /v1."
ADVICE = {  # by the status of an answer
    400: "If a limit is too low, serve with a longer context (--max-model-len in vLLM, --context-length in SGLang) "
    f"or with --max-logprobs {LISTED}.",
    401: "Requests carry no API key: forward a port behind the gateway.",
    404: OTHER_SERVER,
}


class Server(Clock):
    """A server that has run each cell once, on prompts from the text. Raises `EngineError` if it does not answer."""

    def __init__(self, url: str, text: str, cells: list[Cell]) -> None:
        self.url, self.text = url.rstrip("/"), text
        self.model = _item(self._ask("/v1/models"), "data", 0, "id")
        self.generator = np.random.default_rng()  # a server caches the prompts that it has seen
        for cell in cells:
            self.run(cell, SHORT)

    def measure(self, cell: Cell) -> float:
        if cell.tokens:
            return self.run(cell, 1)
        tokens = SHORT + STEPS
        return self.run(cell, tokens) / tokens  # with its short prompt, as a client sees it

    def generate(self, prompts: int, prompt_tokens: int, tokens: int) -> float:
        length = CHARACTERS * prompt_tokens
        begins = self.generator.integers(len(self.text) - length + 1, size=prompts)
        texts = [self.text[begin : begin + length] for begin in begins]
        with ThreadPoolExecutor(prompts) as pool:
            begin = time.perf_counter()
            answers = list(pool.map(lambda text: self._complete(text, max_tokens=tokens, ignore_eos=True), texts))
            ms = (time.perf_counter() - begin) * 1e3
        if any(_item(answer, "usage", "completion_tokens") != tokens for answer in answers):
            raise EngineError(f"{self.url} generated fewer tokens than requested. {OTHER_SERVER}")
        return ms

    def read(self, listed: int) -> Reading:
        """Returns the server's reading of the text. Each window has as many tokens as the shortest."""
        try:
            return self._reading(listed)
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} returned log-probabilities in a form that is not OpenAI's: {shown_text(error)}. "
                f"{OTHER_SERVER}"
            ) from error

    def evaluate(self, task: str) -> Scores:
        return evaluate(task, self.url, self.model)

    def _reading(self, listed: int) -> Reading:
        with ThreadPoolExecutor(READERS) as pool:
            answers = list(pool.map(lambda text: self._read(text, listed), windows(self.text)))
        length = min(len(tokens) for tokens, _, _ in answers)
        shape = (len(answers), length - 1, 1 + listed)
        tokens, logprobs = np.full(shape, NO_TOKEN, np.int64), np.full(shape, NO_LOGPROB, np.float32)
        for n, (texts, chosen, top) in enumerate(answers):
            for i in range(1, length):
                row = [(texts[i], chosen[i]), *_most_likely(top[i], listed)]
                tokens[n, i - 1, : len(row)] = [_token(text) for text, _ in row]
                logprobs[n, i - 1, : len(row)] = [logprob for _, logprob in row]
        ids = np.array([[_token(text) for text in texts[:length]] for texts, _, _ in answers])
        if not np.isfinite(logprobs).all():
            raise EngineError(f"{self.url} returned a log-probability that is not finite. Check its checkpoint.")
        return Reading(ids, tokens, logprobs)

    def _read(self, text: str, listed: int) -> tuple[list[str], list[float], list[dict[str, float]]]:
        """Returns the tokens of a prompt, their log-probabilities, and those of the most likely tokens."""
        answer = self._complete(text, max_tokens=1, echo=True, logprobs=listed)
        count, found = _item(answer, "usage", "prompt_tokens"), _item(answer, "choices", 0, "logprobs")
        tokens, chosen, top = (_item(found, name)[:count] for name in ("tokens", "token_logprobs", "top_logprobs"))
        if not 1 < count == len(tokens) == len(chosen) == len(top):
            raise EngineError(
                f"{self.url} returned no log-probabilities of the prompt (echo with logprobs). {OTHER_SERVER}"
            )
        return tokens, chosen, top

    def _complete(self, prompt: str, **options: Any) -> Any:
        return self._ask("/v1/completions", {"model": self.model, "prompt": prompt, "temperature": 0, **options})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                answer = reply.read(MOST_ANSWER_BYTES + 1)
            if len(answer) > MOST_ANSWER_BYTES:
                raise EngineError(
                    f"{self.url}{path} answered with more than {MOST_ANSWER_BYTES:,} bytes. {OTHER_SERVER}"
                )
            return json.loads(answer)
        except urllib.error.HTTPError as error:
            said = shown_text(_message(error.read(MOST_ERROR_BYTES))).removesuffix(".")
            advice = ADVICE.get(error.code, "See the server's log.")
            raise EngineError(f"{self.url}{path} answered {error.code}: {said}. {advice}") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise EngineError(
                f"{self.url}{path} did not answer: {shown_text(error)}. Check the URL, and whether the server runs."
            ) from error


def windows(text: str) -> list[str]:
    """Returns the parts of a text that are read, each of about `WINDOW` tokens.

    Raises:
        UnsupportedError: there are fewer than two.
    """
    length = CHARACTERS * WINDOW
    count = min(len(text) // length, MOST_WINDOWS)
    if count < 2:
        raise UnsupportedError(f"The text has {len(text)} characters, and {2 * length} are needed. Give a longer text.")
    return [text[length * i : length * (i + 1)] for i in range(count)]


def _most_likely(top: dict[str, float], listed: int) -> list[tuple[str, float]]:
    """Returns the tokens in descending order. Servers add the prompt's own token, and name tokens by their text."""
    known = [(text, logprob) for text, logprob in top.items() if FRAGMENT not in text]
    return sorted(known, key=lambda item: -item[1])[:listed]


def _token(text: str) -> int:
    """Returns a number for a token's text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1


def _message(answer: bytes) -> str:
    """Returns the message of an error of vLLM (in `error`) or SGLang, or else the whole answer."""
    try:
        found = json.loads(answer)
        return " ".join(found.get("error", found)["message"].split())
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return answer.decode(errors="replace")


def _item(answer: Any, *path: str | int) -> Any:
    """Returns a part of a server's answer. Raises `EngineError` if it is not there."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"the server's answer has no {'.'.join(map(str, path))}. {OTHER_SERVER}") from None
    return answer
