"""`compare --url` with two servers of vLLM: a good checkpoint passes, one whose experts are spoiled does not."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.serve_demo import free_port, is_healthy, stop, vllm_command
from fp8moe_plugin.compare import measure
from tests.engine.conftest import ROOT
from tests.faults import FULL
from warmup.__main__ import main

pytestmark = pytest.mark.skipif(not FULL, reason="starts two servers; runs in `make faults`")
GOOD = ROOT / "tests/data/capitals"
READY_S = 300


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The down projections of the routed experts have twice their scales."""
    folder = tmp_path_factory.mktemp("spoiled") / "capitals"
    shutil.copytree(GOOD, folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    names = [name for name in tensors if ".experts." in name and name.endswith("down_proj.weight_scale_inv")]
    assert names
    save_file(tensors | {name: tensors[name] * 2 for name in names}, shard, metadata={"format": "pt"})
    return folder


@contextlib.contextmanager
def server(checkpoint: Path, environment: dict[str, str]) -> Iterator[str]:
    command, of_server = vllm_command(str(checkpoint), torch.cuda.is_available())
    port = free_port()
    command[command.index("--max-model-len") + 1] = "2048"  # the later options of a command win
    command += ["--quantization", "fp8moe", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | environment | of_server, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def wait_until_healthy(*urls: str) -> None:
    deadline = time.monotonic() + READY_S
    while not all(map(is_healthy, urls)):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_limits_pass_a_good_checkpoint_and_fail_a_spoiled_one(
    spoiled: Path, environment_of_engines: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ENOUGH_S", 0)
    texts = [f"The capital of France is Paris. Question {n}? Tokyo is the capital of Japan." for n in range(80)]
    (tmp_path / "text.txt").write_text("\n".join(texts))
    with server(GOOD, environment_of_engines) as good, server(spoiled, environment_of_engines) as bad:
        wait_until_healthy(good, bad)
        found = {}
        for name, url in (("good", good), ("bad", bad)):
            report = tmp_path / f"{name}.json"
            options = ["--url", url, "--baseline", good, "--text", tmp_path / "text.txt", "--sequences", 1]
            status = main(["compare", *map(str, options), "--max-kl", "0.005", "--json", str(report)])
            (limit,) = json.loads(report.read_text())["compare"]["limits"]
            found[name] = status, limit["outcome"]
    assert found == {"good": (0, "met"), "bad": (3, "NOT MET")}
