"""What is written down of engines that read, take turns and fail; stand-ins take their places."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8moe_plugin.compare import measure as timing
from fp8moe_plugin.compare.cells import Cell
from fp8moe_plugin.compare.engine import WINDOW, token_ids
from fp8moe_plugin.compare.intervals import Reading
from fp8moe_plugin.compare.measure import Cells, measure
from fp8moe_plugin.compare.process import EngineError
from fp8moe_plugin.compare.result import CompareResult, EngineResult
from fp8moe_plugin.compare.turns import Engines
from fp8moe_plugin.errors import UnsupportedError

NAMES = ["fp8moe", "fp8", "bf16"]
CELLS = Cells(Cell("first token", 1, 1024), (Cell("decode 1", 1, 0), Cell("decode 8", 8, 0)), rounds=3, most_rounds=3)


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Process:
    """Answers at once; `failing` says at which call of its kind it fails, with a line in its log."""

    def __init__(self, name: str, calls: list[tuple[str, str]], failing: tuple[str, int] | None, text: int) -> None:
        self.name, self.calls, self.failing, self.text = name, calls, failing, text
        self.log = Path(f"{name}.log")
        self.killed = False

    def start(self) -> None:
        pass

    def has_answered(self, timeout: float) -> bool:
        return True

    def wait_until_made(self, timeout: float) -> float:
        self.do("make")
        return 0.0

    def call(self, method: str, argument: Any, timeout: float) -> Any:
        self.do(method)
        if method == "measure":
            return float(len(self.calls))
        windows = np.full((2, 3), self.text)
        return Reading(windows, np.zeros((2, 2, 1 + argument), int), np.full((2, 2, 1 + argument), -1.0))

    def do(self, what: str) -> None:
        assert not self.killed
        times = self.calls.count((self.name, what))
        self.calls.append((self.name, what))
        if self.failing == (what, times):
            self.log.write_text("Traceback")
            raise EngineError(f"{what} failed")

    def kill(self) -> None:
        self.killed = True


def empty_result() -> CompareResult:
    return CompareResult(
        date="", gpu="", vllm="", model="", twin=None, parallel="", text="", text_sha256="", window_tokens=3,
        listed_tokens=4, prompt_tokens=1024, engines=[EngineResult(name=name) for name in NAMES],
    )  # fmt: skip


def measured(
    failing: dict[str, tuple[str, int]] | None = None,
    text: dict[str, int] | None = None,
    cells: Cells = CELLS,
    result: CompareResult | None = None,
) -> tuple[dict[str, EngineResult], dict[str, Reading], list[tuple[str, str]], list[str]]:
    """Returns the result of each engine, what they read, the calls, and the lines of progress."""
    calls: list[tuple[str, str]] = []
    lines: list[str] = []
    processes: Any = {n: Process(n, calls, (failing or {}).get(n), (text or {}).get(n, 0)) for n in NAMES}
    result = result or empty_result()
    readings: dict[str, Reading] = {}
    measure(Engines(processes, 7, lines.append), cells, result, readings)
    assert all(process.killed for process in processes.values())
    return {engine.name: engine for engine in result.engines}, readings, calls, lines


def test_all_engines_read_and_are_timed_in_turns() -> None:
    results, readings, calls, lines = measured()
    assert list(readings) == NAMES
    assert all(reading.tokens.shape == (2, 2, 5) for reading in readings.values())
    timed = [name for name, what in calls if what == "measure"]
    assert all(sorted(timed[i : i + 3]) == sorted(NAMES) for i in range(0, len(timed), 3))
    assert timed[:3] == timed[5:2:-1]
    for engine in results.values():
        assert engine.error is engine.log is None
        assert engine.first_token_ms
        assert len(engine.first_token_ms.rounds_ms) == 3
        assert sorted(engine.tokens_per_s) == [1, 8]
        step = np.median(engine.tokens_per_s[8].rounds_ms)
        assert engine.tokens_per_s[8].value == pytest.approx(8000 / step, abs=1e-3)
        assert engine.ready_s is not None
        assert engine.reading_s is not None
    assert lines[0] == "starting fp8moe, fp8, bf16; their output is in fp8moe.log, fp8.log, bf16.log"
    assert any(line.startswith("decode 8: ") and all(name in line for name in NAMES) for line in lines)


@pytest.mark.parametrize(("enough", "rounds"), [(0.0, 3), (1e9, 7)])
def test_short_cells_have_more_rounds(monkeypatch: pytest.MonkeyPatch, enough: float, rounds: int) -> None:
    monkeypatch.setattr(timing, "ENOUGH_S", enough)
    results, *_ = measured(cells=replace(CELLS, most_rounds=7))
    for engine in results.values():
        assert engine.first_token_ms
        assert [len(found.rounds_ms) for found in (engine.first_token_ms, *engine.tokens_per_s.values())] == [
            rounds
        ] * 3


@pytest.mark.parametrize(("what", "times"), [("make", 0), ("read", 0), ("measure", 0), ("measure", 4)])
def test_failed_engine_keeps_results_and_others_continue(what: str, times: int) -> None:
    results, readings, _, lines = measured({"fp8": (what, times)})
    assert f"fp8 failed: {what} failed" in lines
    failed = results["fp8"]
    assert (failed.error, failed.log) == (f"{what} failed", "fp8.log")
    assert (failed.ready_s is None) == (what == "make")
    assert ("fp8" in readings) == (what == "measure")
    rounds = failed.first_token_ms.rounds_ms if failed.first_token_ms else []
    assert len(rounds) == min(3, times)
    assert [len(found.rounds_ms) for found in failed.tokens_per_s.values()] == [1] * (times == 4)
    for name in ("fp8moe", "bf16"):
        assert not results[name].error
        assert len(results[name].tokens_per_s[8].rounds_ms) == 3
        assert name in readings


def test_an_interrupt_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of engines that failed are kept, those of interrupted ones are not."""

    def interrupted(engines: Engines) -> None:
        Path("bf16.log").write_text("Traceback")
        with engines.errors("bf16"):
            raise EngineError("no memory")
        engines.found["fp8"]["error"] = "interrupted after 5 s, before it was ready"
        raise KeyboardInterrupt

    monkeypatch.setattr(Engines, "start", interrupted)
    result = empty_result()
    with pytest.raises(KeyboardInterrupt):
        measured(result=result)
    assert {engine.name: engine.log for engine in result.engines if engine.error} == {
        "fp8": None,
        "bf16": "bf16.log",
    }


def test_a_twin_that_reads_other_tokens_is_not_compared() -> None:
    results, readings, _, _ = measured(text={"bf16": 1})
    assert results["bf16"].error == (
        "its tokenizer reads the text as other tokens than that of fp8moe. Compare two of the same model."
    )
    assert results["bf16"].log is None  # an empty output is not kept
    assert list(readings) == ["fp8moe", "fp8"]


class Tokenizer:
    """Every character is a token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(char) for char in text]


def test_the_first_windows_of_a_text_are_read() -> None:
    assert len(token_ids(Tokenizer(), "x" * 10**6)) == 64 * WINDOW
    assert token_ids(Tokenizer(), "ab" * WINDOW).tolist() == [97, 98] * WINDOW
    with pytest.raises(UnsupportedError, match="1023 tokens, and 1024 are needed"):
        token_ids(Tokenizer(), "x" * (2 * WINDOW - 1))
