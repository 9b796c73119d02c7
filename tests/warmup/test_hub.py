"""A model given by its id: only its config.json is downloaded, here from a local server instead of the hub."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warmup.conftest import CONFIGS

CONFIG = (CONFIGS / "DeepSeek-V3.json").read_bytes()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `maker/model`; any other is unknown."""

    fetched: set[str] = set()

    def do_GET(self) -> None:
        if self.path.startswith("/maker/model/resolve/"):
            Hub.fetched.add(self.path.rpartition("/")[2])
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
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def list_kernels(model: str, hub: str, home: Path, offline: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FP8MOE_"))}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "NO_PROXY": "*", "HF_HUB_OFFLINE": str(int(offline))}
    command = [sys.executable, "-m", "warmup", "list", "--model", model]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_only_the_description_of_a_model_is_fetched(hub: str, tmp_path: Path) -> None:
    done = list_kernels("maker/model", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "22 kernels, " in done.stdout
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
