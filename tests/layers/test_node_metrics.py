"""A node without a server exports the metrics of its workers by a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs prometheus_client")

from fp8moe_plugin.layers.metrics_folder import PREFIX, hold_lock
from fp8moe_plugin.layers.node_metrics import added_up, main

LAYERS = """# HELP fp8moe_layers Layers
# TYPE fp8moe_layers gauge
fp8moe_layers{backend="sm90",layout="contiguous"} 3.0
"""


@pytest.fixture
def temp(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files, with that of a server whose workers have not loaded a layer yet."""
    folder = tmp_path / f"{PREFIX}engine"
    folder.mkdir()
    lock = hold_lock(folder)
    yield tmp_path
    os.close(lock)


def started(temp: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fp8moe_plugin.layers.node_metrics", *arguments]
    environment = os.environ | {"TMPDIR": str(temp)}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def scraped(port: int, process: subprocess.Popen[str]) -> str:
    for _ in range(300):
        try:
            return urllib.request.urlopen(f"http://localhost:{port}/metrics").read().decode()
        except urllib.error.URLError:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
    raise AssertionError("it does not answer")


def test_it_answers_once_a_worker_has_loaded_a_layer(temp: Path) -> None:
    port = free_port()
    process = started(temp, "--port", str(port))
    try:
        time.sleep(0.5)
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://localhost:{port}/metrics")
        for worker in range(2):
            (temp / f"{PREFIX}engine" / f"{worker}.prom").write_text(LAYERS)
        assert 'fp8moe_layers{backend="sm90",layout="contiguous"} 6.0' in scraped(port, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_files_of_a_server_that_ends_during_a_scrape_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "1.prom"
    file.write_text(LAYERS)
    (layers,) = added_up([tmp_path / "0.prom", file])
    assert [sample.value for sample in layers.samples] == [3]


def test_a_port_that_cannot_be_used_is_refused_before_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        for port, why in (str(taken.getsockname()[1]), "Address already in use"), ("70000", "must be 0-65535"):
            with pytest.raises(SystemExit):
                main(["--port", port])
            said = capsys.readouterr().err
            assert f"argument --port: {port}: " in said
            assert why in said


def test_it_says_where_it_looks_for_workers(temp: Path) -> None:
    process = started(temp, "--port", str(free_port()))
    try:
        assert process.stdout
        assert process.stdout.readline().endswith(f"once a worker has written into {temp}/{PREFIX}*\n")
    finally:
        process.kill()
        process.communicate()


def test_it_needs_neither_torch_nor_an_engine() -> None:
    code = "import sys, fp8moe_plugin.layers.node_metrics; print({'torch', 'vllm', 'sglang'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
