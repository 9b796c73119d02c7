"""The counts of workers are added up in the metrics of the process that started them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import fp8moe_plugin
from fp8moe_plugin.layers import metrics
from tests.layers.test_metrics_folder import clean_environment

# A worker: its arguments are the names of its layers of experts, and the number of loaded kernels by origin.
WORKER = """
import json, sys
from fp8moe_plugin.jit import lookup
from fp8moe_plugin.jit.driver import LoadCounts
from fp8moe_plugin.jit.lookup import Origin
from fp8moe_plugin.layers import metrics

names, origins = map(json.loads, sys.argv[1:])
counts = LoadCounts()
for name in names:
    for origin, number in origins.items():
        counts.origins[Origin(origin)] += number
        lookup.compile_times.extend([0.5] * number * (origin == "compiler"))
    metrics.count_build(["nvrtc 13.0.88"], "sm90")
    metrics.count_layer(name, "sm90", "contiguous")
    metrics.update(counts)
"""
# A server: its metrics are read after all workers have ended.
SERVER = """
import subprocess, sys
from vllm.v1.metrics.prometheus import get_prometheus_registry, setup_multiprocess_prometheus
if sys.argv.pop() == "several":
    setup_multiprocess_prometheus()
import prometheus_client
from fp8moe_plugin.layers import metrics

metrics.expose()
metrics.expose()  # of the config of a draft model
for names, origins in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    subprocess.run([sys.executable, "-c", sys.argv[1], names, origins], check=True)
print(prometheus_client.generate_latest(get_prometheus_registry()).decode())
"""
EXPECTED = {
    'fp8moe_kernel_hits_total{source="bundle"}': 6,
    'fp8moe_kernel_hits_total{source="cache"}': 2,
    'fp8moe_kernel_hits_total{source="wheel"}': 3,
    "fp8moe_kernel_misses_total": 1,
    "fp8moe_compile_seconds_total": 0.5,
    'fp8moe_layers{backend="sm90",layout="contiguous"}': 3,
    f'fp8moe_build_info{{backend="sm90",kernels="nvrtc 13.0.88",version="{fp8moe_plugin.__version__}"}}': 2,
}


@pytest.mark.parametrize("servers", ["one", "several"])
def test_workers_are_added_up(servers: str) -> None:
    workers = ['["a", "b", "a"]', '{"bundle": 2}', '["a"]', '{"cache": 2, "wheel": 3, "compiler": 1}']
    command = [sys.executable, "-c", SERVER, WORKER, *workers, servers]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment()).stdout
    lines = [line.rsplit(" ", 1) for line in shown.splitlines() if line.startswith("fp8moe_")]
    assert {name: float(value) for name, value in lines if "_created" not in name} == EXPECTED
    for name, kind in (("kernel_hits_total", "counter"), ("layers", "gauge")):
        assert shown.count(f"# TYPE fp8moe_{name} {kind}\n") == 1


def test_a_server_below_another_one_shows_its_own_workers_alone(tmp_path: Path) -> None:
    (tmp_path / "1.prom").write_text("# TYPE fp8moe_kernel_misses counter\nfp8moe_kernel_misses_total 7.0\n")
    command = [sys.executable, "-c", SERVER, WORKER, '["a"]', '{"compiler": 1}', "one"]
    environment = clean_environment() | {metrics.FOLDER: str(tmp_path)}
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert "fp8moe_kernel_misses_total 1.0\n" in shown


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(metrics, "log_once", lambda level, text: lines.append(text))
    return lines


def tell() -> None:
    metrics.update(metrics._exported)  # nothing new


def test_a_process_without_a_server_on_its_machine_says_so(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    for name in (metrics.FOLDER, metrics.BY_PROMETHEUS):
        monkeypatch.delenv(name, raising=False)
    tell()
    assert logged == ["the kernels of this process are not counted at /metrics: it was not started by a server"]


def test_a_folder_that_is_gone_costs_a_line_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: list[str]
) -> None:
    monkeypatch.delenv(metrics.BY_PROMETHEUS, raising=False)
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path / "gone"))
    tell()
    assert "not counted at /metrics: [Errno 2]" in logged[0]


def test_where_no_folder_can_be_made_the_server_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only")

    for name in (metrics.FOLDER, metrics.BY_PROMETHEUS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metrics.tempfile, "TemporaryDirectory", refuse)
    metrics.expose.__wrapped__()
    assert logged == ["kernels are not counted at /metrics: read-only"]
    assert metrics.FOLDER not in os.environ
