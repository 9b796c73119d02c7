"""benchmarks.engine.decode with stand-ins for engines: their turns, and what remains when one fails."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import decode as engine_decode
from benchmarks.engine.decode import Engines, line
from benchmarks.engine.prefill import ENGINES
from benchmarks.engine.process import EngineError

NAMES = ["fp8moe", "triton", "deepgemm"]
ROUNDS, TIMEOUT = 3, 7
PROFILE = {"gpu_ms": 0.5, "moe_ms": None}
Failure = tuple[str, str, int]  # engine, call, how many such calls succeed first


class Process:
    """Answers at once, or raises as `failing` says."""

    failing: dict[Failure, BaseException] = {}
    done: list[tuple[str, str]] = []
    killed: list[str] = []
    environments: dict[str, dict[str, str]] = {}
    shares: list[float] = []

    def __init__(self, make: Any, environment: dict[str, str]) -> None:
        self.name, _, _, share = make.args
        self.environments[self.name] = environment
        self.shares.append(share)

    def start(self) -> None:
        pass

    def wait_until_made(self, timeout: float) -> None:
        self.do("make", timeout)

    def call(self, method: str, batch: int, timeout: float) -> Any:
        self.do(method, timeout)
        return PROFILE if method == "profile" else float(len(self.done))

    def do(self, what: str, timeout: float) -> None:
        assert timeout == TIMEOUT
        times = self.done.count((self.name, what))
        self.done.append((self.name, what))
        if failure := self.failing.get((self.name, what, times)):
            raise failure

    def kill(self) -> None:
        self.killed.append(self.name)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    monkeypatch.setattr(engine_decode, "EngineProcess", Process)
    for name, empty in {"failing": {}, "done": [], "killed": [], "environments": {}, "shares": []}.items():
        monkeypatch.setattr(Process, name, empty)
    return Process


def measured(process: type[Process], *failures: Failure) -> Engines:
    """Three engines, started, with batch 8 measured."""
    process.failing |= {failure: EngineError(f"{failure[1]} failed") for failure in failures}
    names = list(NAMES)
    engines = Engines(names, Path("model"), [8], ROUNDS, TIMEOUT)
    for name in NAMES:
        engines.start(name)
    engines.measure(8)
    assert names == NAMES
    return engines


def turns(process: type[Process]) -> list[str]:
    return [name for name, what in process.done if what == "step_ms"]


def test_engines_take_turns_and_each_comes_first_in_turn(process: type[Process]) -> None:
    engines = measured(process)
    assert turns(process) == NAMES + NAMES[1:] + NAMES[:1] + NAMES[2:] + NAMES[:2]
    assert not process.killed
    assert process.shares == [0.3] * 3
    for name, found in engines.found.items():
        row = found["batches"]["8"]
        assert row["ms"] == sorted(row["rounds"])[1]
        assert row.items() >= PROFILE.items()
        assert line(name, found) == f"{name:9}  8: {row['ms']:.3f} ms (GPU 0.500)  ready after 0 s"


def test_those_left_take_turns(process: type[Process]) -> None:
    measured(process, ("deepgemm", "make", 0))
    assert turns(process) == ["fp8moe", "triton", "triton", "fp8moe", "fp8moe", "triton"]


@pytest.mark.parametrize(
    ("what", "times", "rounds"), [("make", 0, 0), ("step_ms", 0, 0), ("step_ms", 1, 1), ("profile", 0, ROUNDS)]
)
def test_an_engine_that_fails_is_asked_nothing_more_and_keeps_what_it_found(
    process: type[Process], what: str, times: int, rounds: int
) -> None:
    engines = measured(process, ("triton", what, times))
    assert process.killed == ["triton"]
    assert [entry for entry in process.done if entry[0] == "triton"][-1] == ("triton", what)
    assert process.done.count(("triton", what)) == times + 1
    found = engines.found.pop("triton")
    row = found.get("batches", {}).get("8")
    assert (len(row["rounds"]) if row else 0) == rounds
    assert line("triton", found) == "triton   " + (f"  8: {row['ms']:.3f} ms" if row else "") + f"  {what} failed"
    assert all(len(other["batches"]["8"]["rounds"]) == ROUNDS for other in engines.found.values())


def test_an_engine_has_defaults_but_what_is_set_stays(process: type[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"TEST_OF_TRITON": "1"}
    monkeypatch.setattr(engine_decode, "DEFAULTS", {"TEST_SET": "default", "TEST_NOT_SET": "default"})
    monkeypatch.setitem(ENGINES, "triton", ({}, own))
    monkeypatch.setenv("TEST_SET", "by hand")
    measured(process)
    assert process.environments["triton"] == {"TEST_NOT_SET": "default"} | own
