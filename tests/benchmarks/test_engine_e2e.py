"""benchmarks.engine.engine_e2e with stand-ins for engines: their turns, the results, and what remains if one fails."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints.synthetic import PRESETS
from benchmarks.engine import engine_e2e
from benchmarks.engine.e2e_engine import KINDS, parse_cell
from benchmarks.engine.e2e_report import best_peer_over_ours, plot, table
from benchmarks.engine.engine_e2e import CELLS, Engines, Report, cells, processes
from fp8moe_plugin.compare.cells import Cell
from fp8moe_plugin.compare.process import EngineError
from fp8moe_plugin.compare.turns import turns
from fp8moe_plugin.errors import UnsupportedError

NAMES = ["fp8moe", "vllm", "triton"]
CELL = Cell("decode 8", 8, 0)
PROFILE = {"gpu_busy_ms": 0.5, "host_ops_ms": 0.25}
Failure = tuple[str, str, int]  # engine, call, how many such calls succeed first


class Process:
    """Answers at once, or raises if `failing` lists the call."""

    failing: set[Failure] = set()
    done: list[tuple[str, str]] = []
    killed: list[str] = []
    shares: list[float] = []

    def __init__(self, make: Any, environment: dict[str, str]) -> None:
        self.name = make.args[0]
        self.shares.append(make.args[-1])

    def start(self) -> None:
        pass

    def has_answered(self, timeout: float) -> bool:
        return True

    def wait_until_made(self, timeout: float) -> float:
        self.do("make")
        return 0.0

    def call(self, method: str, cell: Cell, timeout: float) -> Any:
        self.do(method)
        return PROFILE if method == "profile" else float(len(self.done))

    def do(self, what: str) -> None:
        times = self.done.count((self.name, what))
        self.done.append((self.name, what))
        if (self.name, what, times) in self.failing:
            raise EngineError(f"{what} failed")

    def kill(self) -> None:
        self.killed.append(self.name)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    monkeypatch.setattr(engine_e2e, "EngineProcess", Process)
    for name, empty in {"failing": set(), "done": [], "killed": [], "shares": []}.items():
        monkeypatch.setattr(Process, name, empty)
    return Process


def measured(process: type[Process], *failures: Failure, rounds: int = 3) -> Engines:
    process.failing |= set(failures)
    engines = Engines(processes(NAMES, "tiny", Path("model"), [CELL]), "tiny", timeout=7)
    engines.start()
    for number in range(rounds):
        engines.measure([CELL], number)
    engines.profile(CELL)
    return engines


def test_each_engine_comes_first_and_last_in_turn() -> None:
    orders = [turns(NAMES, number) for number in range(6)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert all(sorted(order[i] for order in orders) == sorted(2 * NAMES) for i in (0, 1, 2))
    assert turns(["a", "b"], 0) == turns(["a", "b"], 1)[::-1]


def test_a_row_has_the_median_and_the_least_of_its_rounds(process: type[Process]) -> None:
    engines = measured(process)
    assert process.shares == [0.3] * 3
    assert not process.killed
    for name in NAMES:
        row = engines.rows[CELL, name]
        assert (row["model"], row["cell"], row["engine"]) == ("tiny", "decode 8", name)
        assert row["ms"] == sorted(row["rounds"])[1]
        assert row["ms_least"] == min(row["rounds"])
        assert row.items() >= PROFILE.items()


@pytest.mark.parametrize(("what", "times"), [("make", 0), ("measure", 0), ("measure", 1), ("profile", 0)])
def test_an_engine_that_fails_is_dropped_and_keeps_its_results(process: type[Process], what: str, times: int) -> None:
    engines = measured(process, ("vllm", what, times))
    assert process.killed == ["vllm"]
    assert [entry for entry in process.done if entry[0] == "vllm"][-1] == ("vllm", what)
    assert engines.found["vllm"]["error"] == f"{what} failed"
    rounds = {"make": 0, "measure": times, "profile": 3}[what]
    assert len(engines.rows.get((CELL, "vllm"), {"rounds": []})["rounds"]) == rounds
    assert all(len(engines.rows[CELL, name]["rounds"]) == 3 for name in ("fp8moe", "triton"))
    assert "decode 8" in table(list(engines.rows.values()))


def test_the_ratio_is_of_the_fastest_peer() -> None:
    rows = [{"engine": name, "ms": ms} for name, ms in (("fp8moe", 2.0), ("vllm", 3.0), ("triton", 5.0))]
    assert best_peer_over_ours(rows) == 1.5
    assert best_peer_over_ours(rows[:1]) is None
    assert best_peer_over_ours(rows[1:]) is None


def test_each_kind_has_a_checkpoint() -> None:
    assert {(kind.family, kind.preset) for kind in KINDS.values()} <= set(PRESETS)


def test_cells_are_parsed() -> None:
    assert len(cells(CELLS)) == 9
    assert parse_cell("prefill 4x2048") == ("prefill 4x2048", 4, 2048)
    assert parse_cell("decode 64") == ("decode 64", 64, 0)
    for wrong in ("prefill 4", "decode 0", "decode 1x2", "prefill 17x2048", "decode 257", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_cell(wrong)


def test_a_report_keeps_other_models_and_can_be_drawn(process: type[Process], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    rows = list(measured(process).rows.values())
    for kind in ("qwen3", "dsv3", "qwen3"):
        report = Report(out, kind)
        report.models[kind] = {"engines": {}}
        report.write([row | {"model": kind} for row in rows])
    found = json.loads(out.read_text())
    assert [row["model"] for row in found["rows"]] == ["dsv3"] * 3 + ["qwen3"] * 3
    assert set(found["models"]) == {"qwen3", "dsv3"}
    plot(out)
    assert b"<svg" in out.with_suffix(".svg").read_bytes()
    out.write_text(json.dumps(found | {"vllm": "0.0"}))
    with pytest.raises(UnsupportedError, match="other versions"):
        Report(out, "dsv3")
