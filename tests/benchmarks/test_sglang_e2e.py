"""benchmarks.engine.sglang_e2e with stand-ins for engines: agreement of each two, and the report."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import sglang_e2e
from benchmarks.engine.sglang_e2e import Engine, main
from fp8moe_plugin.compare.cells import Cell
from fp8moe_plugin.compare.process import EngineError

ANSWERS = {  # next tokens, their log-probabilities and greedy tokens of one prompt
    "fp8moe": ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0], [5, 6, 7]),
    "sglang": ([1, 2, 3, 9], [-1.0, -1.5, -1.0, -1.0], [5, 6, 8]),
    "sglang-deepgemm": ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0], [5, 6, 7]),
    "unquantized": ([1, 2, 9, 4], [-1.0, -1.0, -1.0, -1.0], [5, 6, 7]),
}


class Process:
    """Answers at once, or fails to start if `failing` names the engine."""

    failing: set[str] = set()

    def __init__(self, make: Any, environment: dict[str, str]) -> None:
        self.name = make.args[0]

    def start(self) -> None:
        pass

    def has_answered(self, timeout: float) -> bool:
        return True

    def wait_until_made(self, timeout: float) -> float:
        if self.name in self.failing:
            raise EngineError("no memory")
        return 0.0

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        if method == "measure":
            return 2.0 if self.name == "fp8moe" else 3.0
        if method == "profile":
            return {"gpu_busy_ms": 1.0, "kernels_us": {"gemm": 900.0}}
        tokens, logprobs, generated = ANSWERS[self.name]
        return {"next_token": [tokens], "logprob": [logprobs], "generated": [generated]}

    def kill(self) -> None:
        pass


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the benchmark on a model; its report."""
    monkeypatch.setattr(sglang_e2e, "EngineProcess", Process)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"num_hidden_layers": 2}))

    def run(*failing: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        monkeypatch.setattr(Process, "failing", set(failing))
        out = tmp_path / "report.json"
        arguments = ["--models", str(tmp_path / "model"), "--out", str(out), "--cells", "decode 4", "--rounds", "2"]
        monkeypatch.setattr("sys.argv", ["sglang_e2e", *arguments, *options])
        main()
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return run


def test_each_two_engines_are_compared_and_each_cell_is_timed(report, capsys):
    found = report()
    pairs = {(pair["engine"], pair["other"]): pair for pair in found["agreement"]}
    assert set(pairs) == {("fp8moe", "sglang"), ("fp8moe", "sglang-deepgemm"), ("sglang", "sglang-deepgemm")}
    assert pairs["fp8moe", "sglang"].items() >= {"next_token": 0.75, "prefix": 2.0, "logprob": 0.125}.items()
    assert pairs["fp8moe", "sglang-deepgemm"].items() >= {"next_token": 1.0, "prefix": 3.0, "logprob": 0.0}.items()
    assert [(row["cell"], row["engine"], row["ms"]) for row in found["rows"]] == [
        ("decode 4", name, ms) for name, ms in (("fp8moe", 2.0), ("sglang", 3.0), ("sglang-deepgemm", 3.0))
    ]
    assert {(row["gpu_busy_ms"], row["host_ops_ms"]) for row in found["rows"]} == {(1.0, None)}
    assert found["models"]["model"]["checkpoint"]["num_hidden_layers"] == 2
    assert "1.50" in capsys.readouterr().out  # best peer / ours


def test_an_unquantized_twin_is_compared_but_not_timed(report, tmp_path):
    found = report(options=("--twins", str(tmp_path)))
    pairs = {(pair["engine"], pair["other"]): pair["next_token"] for pair in found["agreement"]}
    assert (len(pairs), pairs["fp8moe", "unquantized"], pairs["sglang", "unquantized"]) == (6, 0.75, 0.5)
    assert {row["engine"] for row in found["rows"]} == {"fp8moe", "sglang", "sglang-deepgemm"}


def test_each_model_has_its_twin_or_none_has(report, tmp_path, capsys):
    with pytest.raises(SystemExit):
        report(options=("--twins", str(tmp_path), str(tmp_path)))
    assert "one checkpoint for each of --models" in capsys.readouterr().err


def test_an_engine_that_does_not_start_leaves_the_others(report):
    found = report("sglang")
    assert found["models"]["model"]["engines"]["sglang"] == {"error": "no memory"}
    assert [pair["other"] for pair in found["agreement"]] == ["sglang-deepgemm"]
    assert {row["engine"] for row in found["rows"]} == {"fp8moe", "sglang-deepgemm"}


class Profiler:
    """As SGLang's engine: each step runs two kernels one after the other, of 30 us together; a prefill is one step."""

    def start_profile(self, output_dir: str, **_: Any) -> None:
        self.trace, self.events = Path(output_dir, "1-TP-0.trace.json.gz"), []

    def steps(self, count: int) -> None:
        for _ in range(count):
            begin = 100 * len(self.events)
            of_step = (("gemm", begin, 10), ("combine", begin + 50, 20))
            self.events += [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in of_step]

    def stop_profile(self) -> None:
        self.trace.write_bytes(gzip.compress(json.dumps({"traceEvents": self.events}).encode()))


@pytest.mark.parametrize("cell", [Cell("decode 4", 4, 0), Cell("prefill 1x128", 1, 128)])
def test_the_gpu_is_profiled_by_the_process_that_runs_the_model(cell: Cell) -> None:
    engine = object.__new__(Engine)
    engine.engine = Profiler()
    engine.run = lambda cell, generated: engine.engine.steps(generated)  # type: ignore[method-assign]
    found = engine.profile(cell)
    assert found == {"gpu_busy_ms": 0.03, "kernels_us": {"combine": 20.0, "gemm": 10.0}}
