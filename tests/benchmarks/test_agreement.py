"""benchmarks.accuracy.agreement with a stand-in for the engines' processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import agreement

LOG = "INFO fp8moe serves the experts: backend triton, 128 experts\nINFO fp8moe serves the experts: backend sm90\n"
SAID = {  # the generated tokens of one prompt, and what the engine's process prints
    "fp8moe triton": ([5, 6, 7], LOG),
    "fp8moe": ([5, 6, 8], "INFO fp8moe serves the experts: backend sm90\n"),
    "triton": ([5, 9, 7], "nothing of ours\n"),
}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the benchmark with these engines; its report."""

    def answers(module: str, options: Any, name: str, timeout: float, environment: Any, log: Path) -> dict[str, Any]:
        if name not in SAID:
            log.write_text("out of memory\n")
            return {"error": "no memory"}
        generated, printed = SAID[name]
        log.write_text(printed)
        return {"ready_s": 1.0, "next_token": [[1, 2]], "logprob": [[-1.0, -2.0]], "generated": [generated]}

    def run(engines: str) -> dict[str, Any]:
        out = tmp_path / "report.json"
        monkeypatch.setattr("sys.argv", ["agreement", "--model", "m", "--engines", engines, "--out", str(out)])
        agreement.main()
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    monkeypatch.setattr(agreement, "in_own_process", answers)
    return run


def test_each_two_engines_are_compared_and_their_kernels_are_named(report):
    found = report("fp8moe triton,fp8moe,triton")
    assert found["served"] == {
        "fp8moe triton": "fp8moe serves the experts: backend triton",
        "fp8moe": "fp8moe serves the experts: backend sm90",
        "triton": None,
    }
    prefixes = {pair: of["prefix"] for pair, of in found["pairs"].items()}
    assert prefixes == {"fp8moe triton ~ fp8moe": 2.0, "fp8moe triton ~ triton": 1.0, "fp8moe ~ triton": 1.0}


def test_an_engine_that_fails_ends_the_run(report):
    with pytest.raises(SystemExit, match="deep_gemm: no memory"):
        report("fp8moe,deep_gemm")
