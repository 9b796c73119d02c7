"""A model given by its id: only its config.json is downloaded, here from a local server instead of the hub."""

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fp8moe_plugin.errors import CheckpointError
from tests.checkpoint.published import PATHS
from warmup import hub as hub_of_warmup

CONFIG = PATHS["DeepSeek-V3"].read_bytes()
START_S = 10  # of Python and its imports, on a busy machine
DOWNLOAD = """
import time
from warmup.hub import download_config
start = time.monotonic()
try:
    download_config("maker/model", None, None)
finally:
    print(time.monotonic() - start)
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `maker/model`; any other is unknown."""

    fetched: set[str] = set()
    revisions: set[str] = set()

    def do_GET(self) -> None:
        if self.path.startswith("/maker/model/resolve/"):
            *_, revision, name = self.path.split("/")
            Hub.fetched.add(name)
            Hub.revisions.add(revision)
            self.answer(CONFIG)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        for name, value in {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.fetched.clear()
    Hub.revisions.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def list_kernels(
    model: str, hub: str, home: Path, offline: bool = False, *options: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FP8MOE_"))}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "NO_PROXY": "*", "HF_HUB_OFFLINE": str(int(offline))}
    command = [sys.executable, "-m", "warmup", "list", "--model", model, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_only_the_description_of_a_model_is_fetched(hub: str, tmp_path: Path) -> None:
    done = list_kernels("maker/model", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "35 kernels, " in done.stdout
    assert Hub.fetched == {"config.json"}


def test_what_was_fetched_before_needs_no_hub(hub: str, tmp_path: Path) -> None:
    assert list_kernels("maker/model", hub, tmp_path).returncode == 0
    done = list_kernels("maker/model", hub, tmp_path, offline=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("offline", [False, True])
def test_a_model_that_cannot_be_had_is_told(hub: str, tmp_path: Path, offline: bool) -> None:
    done = list_kernels("maker/other", hub, tmp_path, offline)
    assert done.returncode == 1
    assert "error: There is no folder 'maker/other', and its config.json cannot be downloaded" in done.stderr
    assert "Check the name, HF_TOKEN and the network, or give the folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://nosuch.invalid"])
def test_a_hub_that_cannot_be_reached_is_told_at_once(endpoint: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = list_kernels("maker/model", endpoint, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: The hub at {endpoint} is unreachable (")
    assert "and there is no folder 'maker/model'. Check the network, HF_ENDPOINT and the proxy" in done.stderr
    assert time.monotonic() - start < 5 + START_S


def test_a_hub_that_accepts_no_connection_is_told_within_five_seconds(tmp_path: Path) -> None:
    """Its queue of connections is full, so that each further one waits; nothing waits a second time."""
    with contextlib.ExitStack() as open_sockets:
        hub = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(hub.getsockname())
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "NO_PROXY": "*"}
        done = subprocess.run(
            [sys.executable, "-c", DOWNLOAD],
            env=environment | {"HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
    assert "is unreachable (no answer within 4 s), and there is no folder 'maker/model'" in done.stderr
    assert float(done.stdout) < 5.5, "it waited again"


def test_a_connection_that_times_out_first_is_told_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object) -> NoReturn:
        raise TimeoutError("timed out")

    monkeypatch.setattr(hub_of_warmup.socket, "create_connection", time_out)
    assert hub_of_warmup._unreachable("https://hub") == "The hub at https://hub is unreachable (no answer within 4 s)"


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_of_warmup, "PATIENCE_S", 0.1)
    monkeypatch.setattr(hub_of_warmup.socket, "create_connection", lambda *_: time.sleep(5) or socket.socket())
    assert hub_of_warmup._unreachable("https://hub") == "The hub at https://hub is unreachable (no answer within 0.1 s)"


def test_a_proxy_is_asked_instead_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(address: tuple[str, int], timeout: float) -> NoReturn:
        asked.append(address)
        raise OSError("no")

    monkeypatch.setattr(hub_of_warmup.socket, "create_connection", connect)
    for name, value in {"https_proxy": "http://proxy:3128", "no_proxy": "inside"}.items():
        monkeypatch.setenv(name, value)
    for endpoint in ("https://hub", "https://inside", "https://inside:8443"):
        hub_of_warmup._unreachable(endpoint)
    assert asked == [("proxy", 3128), ("inside", 443), ("inside", 8443)]


def test_what_was_fetched_before_is_used_where_the_hub_is_unreachable(hub: str, tmp_path: Path) -> None:
    assert list_kernels("maker/model", hub, tmp_path).returncode == 0
    done = list_kernels("maker/model", "http://127.0.0.1:9", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is unreachable ([Errno 111] Connection refused): the config.json that was downloaded before" in done.stderr


def test_without_the_client_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_of_warmup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"extra `hub` .* Run `pip install huggingface_hub`, or give a folder"):
        hub_of_warmup.download_config("maker/model", None, None)


def test_a_revision_and_a_folder_for_downloads(hub: str, tmp_path: Path) -> None:
    done = list_kernels("maker/model", hub, tmp_path, False, "--revision", "v2", "--download-dir", str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    assert Hub.revisions == {"v2"}
    assert list((tmp_path / "d").rglob("config.json"))
    assert "config.json:" not in done.stderr, "a progress bar in a pipe"
