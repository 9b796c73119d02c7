"""benchmarks.engine_decode: whose turn it is, and what is kept when an engine fails; engines that are none."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_decode
from benchmarks.engine_decode import ENGINES, Engines, batch_sizes, engine_names, line, positive
from benchmarks.engine_process import EngineError

NAMES = ["fp8moe", "triton", "deepgemm"]
ROUNDS = 3
PROFILE = {"gpu_ms": 0.5, "moe_ms": None}


class Process:
    """Answers at once; fails at the calls of `failing`, (engine, what it does, how often it did that before)."""

    failing: set[tuple[str, str, int]] = set()
    done: list[tuple[str, str]] = []
    killed: list[str] = []

    def __init__(self, make: Any, environment: dict[str, str]) -> None:
        self.name = make.args[0]

    def start(self) -> None:
        pass

    def wait_until_made(self, timeout: float) -> None:
        self.do("make")

    def call(self, method: str, batch: int, timeout: float) -> Any:
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
def engines(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Engines:
    """All three, started, of which one fails when the parameter says so; batch 8 was measured."""
    monkeypatch.setattr(engine_decode, "EngineProcess", Process)
    monkeypatch.setattr(Process, "failing", {request.param} if request.param else set())
    for what in ("done", "killed"):
        monkeypatch.setattr(Process, what, [])
    engines = Engines(NAMES, Path("model"), [8], ROUNDS, timeout=1)
    for name in NAMES:
        engines.start(name)
    engines.measure(8)
    return engines


@pytest.mark.parametrize("engines", [None], indirect=True)
def test_engines_take_turns_and_each_comes_first_in_turn(engines: Engines) -> None:
    steps = [name for name, what in Process.done if what == "step_ms"]
    assert [steps[i : i + 3] for i in range(0, 9, 3)] == [NAMES, NAMES[1:] + NAMES[:1], NAMES[2:] + NAMES[:2]]
    assert not Process.killed
    for name, found in engines.found.items():
        row = found["batches"]["8"]
        assert row["ms"] == sorted(row["rounds"])[1]
        assert row.items() >= PROFILE.items()
        assert line(name, found) == f"{name:9}  8: {row['ms']:.3f} ms (GPU 0.500)  ready after 0 s"


@pytest.mark.parametrize(
    ("engines", "rounds"),
    [(("triton", "make", 0), None), (("triton", "step_ms", 1), None), (("triton", "profile", 0), ROUNDS)],
    indirect=["engines"],
)
def test_an_engine_that_fails_is_asked_nothing_more_and_keeps_what_it_found(
    engines: Engines, rounds: int | None
) -> None:
    (_, what, times), *_ = Process.failing
    assert Process.killed == ["triton"]
    assert [entry for entry in Process.done if entry[0] == "triton"][-1] == ("triton", what)
    assert Process.done.count(("triton", what)) == times + 1
    found = engines.found.pop("triton")
    row = found.get("batches", {}).get("8")
    assert (row and len(row["rounds"])) == rounds
    assert line("triton", found).endswith(f"  {what} failed")
    assert all(len(other["batches"]["8"]["rounds"]) == ROUNDS for other in engines.found.values())


def test_arguments_become_names_and_numbers() -> None:
    assert engine_names(",".join(ENGINES)) == list(ENGINES)
    assert batch_sizes("1,64") == [1, 64]


@pytest.mark.parametrize(
    ("check", "text", "why"),
    [
        (engine_names, "fp8moe,vllm", "no such engine: vllm; there are fp8moe, triton, deepgemm"),
        (engine_names, "fp8moe,fp8moe", "an engine twice: fp8moe,fp8moe"),
        (positive, "0", "not a number from 1 on: 0"),
        (positive, "-1", "not a number from 1 on: -1"),
        (batch_sizes, "1,x", "not a number from 1 on: x"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(check: Callable[[str], Any], text: str, why: str) -> None:
    with pytest.raises(ArgumentTypeError) as error:
        check(text)
    assert str(error.value) == why
