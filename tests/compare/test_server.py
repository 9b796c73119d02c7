"""What is made of the answers of a server; tests/engine/test_compare_servers.py asks vLLM's."""

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from fp8moe_plugin.compare import server as module
from fp8moe_plugin.compare.cells import SHORT, STEPS, Cell
from fp8moe_plugin.compare.engine import WINDOW
from fp8moe_plugin.compare.intervals import divergence, same_token
from fp8moe_plugin.compare.process import EngineError
from fp8moe_plugin.compare.server import CHARACTERS, FRAGMENT, NO_TOKEN, Server, windows
from fp8moe_plugin.errors import UnsupportedError

TEXT = "abcd" * 2 * WINDOW
CELLS = [Cell("first token", 1, 8), Cell("decode 3", 3, 0)]
Answer = Callable[[dict[str, Any]], Any]


def completion(body: dict[str, Any], likely: float = 0.7) -> dict[str, Any]:
    """Every character is a token, and the server lists each with `likely` and a second one."""
    prompt = list(body["prompt"])
    logprobs = {
        "tokens": [*prompt, "!"],
        "token_logprobs": [None, *[math.log(likely)] * len(prompt)],
        "top_logprobs": [None, *({t: math.log(likely), "?": math.log(0.2), FRAGMENT: -2.0} for t in prompt[1:]), {}],
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
    return {"choices": [{"text": "", "logprobs": logprobs if body.get("echo") else None}], "usage": usage}


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[str, list[dict[str, Any]]]]]:
    """Starts a server that answers with a function of the request. Returns its URL and the requests it gets."""
    servers: list[ThreadingHTTPServer] = []

    def serve(answer: Answer) -> tuple[str, list[dict[str, Any]]]:
        asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/v1/models"
                self.reply({"data": [{"id": "small"}]} if known else None, 200 if known else 404)

            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                content = answer(asked[-1])
                self.reply(content, 400 if "error" in str(content) else 200)

            def reply(self, content: Any, status: int) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Plenty(ThreadingHTTPServer):
            request_queue_size = 64

        servers.append(Plenty(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/", asked

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


Serve = Callable[[Answer], tuple[str, list[dict[str, Any]]]]


def test_a_server_is_asked_and_timed(serve: Serve) -> None:
    url, asked = serve(completion)
    server = Server(url, TEXT, CELLS)
    assert [len(body["prompt"]) for body in asked] == [8 * CHARACTERS, *[32 * CHARACTERS] * 3]
    asked.clear()
    assert server.measure(CELLS[0]) > server.measure(CELLS[1]) > 0
    assert [body["max_tokens"] for body in asked] == [1, *[SHORT + STEPS] * 3]
    assert all(body["ignore_eos"] and body["model"] == "small" and body["temperature"] == 0 for body in asked)


def test_a_reading_has_the_tokens_by_their_texts(serve: Serve) -> None:
    one, other = (Server(serve(partial)[0], TEXT, []) for partial in (completion, lambda body: completion(body, 0.6)))
    ours, reference = one.read(3), other.read(3)
    assert ours.windows.shape == (2, CHARACTERS * WINDOW)
    assert np.array_equal(ours.windows, reference.windows)
    assert len(np.unique(ours.windows)) == 4
    assert (ours.tokens[..., 0] == ours.windows[:, 1:]).all()
    assert (ours.tokens[..., 1] == ours.tokens[..., 0]).all()
    assert (ours.tokens[..., 3] == NO_TOKEN).all()  # a part of a character may be any of several tokens
    expected = 0.6 * math.log(0.6 / 0.7) + 0.2 * math.log(0.2 / 0.1)
    assert divergence(ours, reference) == pytest.approx(expected, rel=1e-5)
    assert (same_token(ours, reference) == 1).all()


TOO_LONG = "The maximum context length is 512 tokens. However, the prompt has 1030. Please reduce its length."


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: {"error": "odd"}, 'v1/completions answered 400: {"error": "odd"}. If a limit is too low, serve'),
        (lambda body: {"error": {"message": TOO_LONG, "type": "BadRequestError"}}, f"answered 400: {TOO_LONG} If a "),
        (lambda body: {"object": "error", "message": TOO_LONG}, f"answered 400: {TOO_LONG} If a "),
        (lambda body: {"error": {"message": "\x1b[31m"}}, r"answered 400: '\\x1b\[31m'. If a "),
        (lambda body: {"error": {"message": ["a"]}}, "answered 400: {"),
        (lambda body: [], "the server's answer has no usage.completion_tokens. Give the URL of a server of vLLM"),
        (lambda body: {"usage": {"completion_tokens": 1}}, "generated fewer tokens than requested"),
    ],
)
def test_a_server_that_answers_otherwise_is_refused(serve: Serve, answer: Answer, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Server(serve(answer)[0], TEXT, CELLS)


NOTHING = {"tokens": [], "token_logprobs": [], "top_logprobs": []}


@pytest.mark.parametrize("change", [{"logprobs": None}, {"logprobs": NOTHING}])
def test_a_server_without_logprobs_of_the_prompt_is_refused(serve: Serve, change: dict[str, Any]) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        found = completion(body)
        found["choices"][0] |= change
        return found

    asked = Server(serve(answer)[0], TEXT, [])
    with pytest.raises(EngineError, match=r"no log-probabilities of the prompt|has no tokens"):
        asked.read(3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 1), ("token_logprobs", "-1.0 or so"), ("top_logprobs", None), ("top_logprobs", ["a"])],
)
def test_logprobs_in_another_form_name_the_server(serve: Serve, name: str, value: Any) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        found = completion(body)
        found["choices"][0]["logprobs"][name][5] = value
        return found

    url = serve(answer)[0].rstrip("/")
    with pytest.raises(EngineError, match=f"{url} returned log-probabilities in a form that is not OpenAI's"):
        Server(url, TEXT, []).read(3)


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",  # ends in the middle
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_an_answer_that_cannot_be_read_names_the_server(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            with listener.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineError, match=f"{url}/v1/models did not answer: "):
            Server(url, TEXT, [])
        thread.join()


def test_an_answer_without_an_end_says_so(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER_BYTES", 1000)
    with pytest.raises(EngineError, match="v1/completions answered with more than 1,000 bytes"):
        Server(serve(completion)[0], TEXT, []).read(3)


def test_a_url_where_nothing_answers_is_named() -> None:
    with pytest.raises(EngineError, match=r"127.0.0.1:9/v1/models did not answer: .*refused"):
        Server("http://127.0.0.1:9", TEXT, [])


def test_a_path_that_a_server_lacks_says_what_to_do(serve: Serve) -> None:
    url = f"{serve(completion)[0]}v1"
    with pytest.raises(EngineError, match=r"/v1/v1/models answered 404: null. Give the URL .* without /v1\.$"):
        Server(url, TEXT, [])


def test_a_text_of_one_window_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="The text has 4095 characters, and 4096 are needed"):
        windows(TEXT[1:])
