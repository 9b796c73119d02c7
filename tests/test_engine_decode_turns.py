"""benchmarks.engine_decode: whose turn it is, what is kept when an engine fails, and that none is left; engines that
are none."""

import json
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_decode
from benchmarks.engine_decode import Engines, batch_sizes, line, main
from benchmarks.engine_prefill import ENGINES, engine_names
from benchmarks.engine_process import EngineError
from warmup.options import count

NAMES = ["fp8moe", "triton", "deepgemm"]
ROUNDS, TIMEOUT = 3, 7
PROFILE = {"gpu_ms": 0.5, "moe_ms": None}
Failure = tuple[str, str, int]  # engine, what it does, how often it did that before


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
    """All three, started, and batch 8 measured."""
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


def test_all_engines_may_fail(process: type[Process]) -> None:
    engines = measured(process, *((name, "step_ms", 1) for name in NAMES))
    assert all(found["error"] == "step_ms failed" for found in engines.found.values())


def test_an_engine_has_defaults_but_what_is_set_stays(process: type[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"TEST_OF_TRITON": "1"}
    monkeypatch.setattr(engine_decode, "DEFAULTS", {"TEST_SET": "default", "TEST_NOT_SET": "default"})
    monkeypatch.setitem(ENGINES, "triton", ({}, own))
    monkeypatch.setenv("TEST_SET", "by hand")
    measured(process)
    assert process.environments["triton"] == {"TEST_NOT_SET": "default"} | own


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that main takes for one, without vLLM; what signals did before, they do again after."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(engine_decode.metadata, "version", lambda name: "1")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt(), ValueError("a fault of ours")])
def test_no_engine_is_left(
    process: type[Process],
    failure: BaseException | None,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = checkpoint / "report.json"
    options = f"--model {checkpoint} --batches 1,8 --rounds {ROUNDS} --timeout {TIMEOUT} --out {out}"
    monkeypatch.setattr(sys, "argv", ["engine_decode", *options.split()])
    if failure:
        process.failing["triton", "step_ms", ROUNDS + 1] = failure
        with pytest.raises(type(failure)):
            main()
    else:
        main()
    assert sorted(process.killed) == sorted(NAMES)
    rounds = {name: [len(row["rounds"]) for row in found["batches"].values()] for name, found in report(out).items()}
    assert rounds == {name: [ROUNDS] if failure else [ROUNDS, ROUNDS] for name in NAMES}
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in table] == [[name, "1:"] for name in NAMES]


def report(path: Path) -> dict[str, Any]:
    engines: dict[str, Any] = json.loads(path.read_text())["engines"]
    return engines


def test_sigterm_ends_engines_and_a_second_one_does_not_stop_that(
    process: type[Process], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_decode", "--model", str(checkpoint), "--timeout", str(TIMEOUT)])
    monkeypatch.setattr(process, "start", lambda self: signal.raise_signal(signal.SIGTERM))
    kill = process.kill

    def killed_meanwhile(self: Process) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        kill(self)

    monkeypatch.setattr(process, "kill", killed_meanwhile)
    with pytest.raises(KeyboardInterrupt):
        main()
    assert process.killed == NAMES[:1]


def test_arguments_become_names_and_numbers() -> None:
    assert engine_names(",".join(ENGINES)) == list(ENGINES)
    assert batch_sizes("1,64") == [1, 64]


@pytest.mark.parametrize(
    ("check", "text", "why"),
    [
        (engine_names, "fp8moe,vllm", "no such engine: vllm; there are fp8moe, triton, deepgemm"),
        (engine_names, "fp8moe,fp8moe", "an engine twice: fp8moe,fp8moe"),
        (count, "0", "'0' is not a number from 1 to 1048576"),
        (count, "-1", "'-1' is not a number from 1 to 1048576"),
        (batch_sizes, "1,x", "'x' is not a number from 1 to 1048576"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(check: Callable[[str], Any], text: str, why: str) -> None:
    with pytest.raises(ArgumentTypeError) as error:
        check(text)
    assert str(error.value) == why
