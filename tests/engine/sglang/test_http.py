"""SGLang's own server, started as `make serve ENGINE=sglang` does, in processes that it spawns itself."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints.answers import random_prompts
from benchmarks.engine.serve_demo import free_port, sglang_command
from tests.engine.generate import GENERATED, PROMPT_TOKENS, PROMPTS
from tests.engine.sglang.conftest import ENVIRONMENT, ROOT
from tests.processes import kill_session

READY_TIMEOUT_S = 600
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through a proxy that the environment names


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of `qwen3_moe-fp8`."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command, environment = sglang_command(str(checkpoints / "qwen3_moe-fp8"), on_gpu=False)
    command += ["--quantization", "fp8moe", "--port", str(port)]
    with (
        log.open("wb") as to,
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment | ENVIRONMENT, stdout=to, stderr=to, start_new_session=True
        ) as process,
    ):
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            kill_session(process)


def wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        try:
            HTTP.open(f"{address}/health_generate", timeout=60)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(f"the server does not become ready: {log.read_text()[-4000:]}")


def test_a_server_says_what_the_engine_says(server, engines):
    body = {
        "input_ids": random_prompts(PROMPTS, PROMPT_TOKENS),
        "sampling_params": {"temperature": 0, "max_new_tokens": GENERATED, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{server}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    said = json.load(HTTP.open(request, timeout=300))
    assert [answer["output_ids"] for answer in said] == engines("qwen3_moe").answers[0]["tokens"]


def test_a_server_shows_the_metrics_of_its_workers(server):
    shown = HTTP.open(f"{server}/metrics", timeout=60).read().decode().splitlines()
    assert 'fp8moe_layers{backend="reference",layout="contiguous"} 1.0' in shown
    assert "fp8moe_kernel_misses_total 0.0" in shown
