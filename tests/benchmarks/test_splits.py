"""The cases of `benchmarks.engine.splits`, without engines."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import split_cases, splits
from benchmarks.engine.lost_rank import processes
from benchmarks.engine.split_cases import CASES, ENGINES, NOT_ON_CPUS, shapes

LOG = """
(APIServer pid=7) INFO started
(EngineCore_DP0 pid=8) INFO started
(EngineCore_DP1 pid=9) INFO started
(Worker_DP1_EP1 pid=10) INFO started
"""
ANSWERS: dict[str, Any] = {"prompts": [[[-0.1, -2.0]]], "generated": [[[-0.2, -1.0]]], "tokens": [[0]]}


def test_cases_name_engines_and_engines_checkpoints() -> None:
    assert set(NOT_ON_CPUS) <= set(CASES)
    engines = {name for case in CASES.values() for name in case.engines()}
    assert engines == set(ENGINES)
    checkpoints = {name for engine in ENGINES.values() for name in (engine.checkpoint, engine.draft) if name}
    assert {name.rpartition("-")[0] for name in checkpoints} == set(shapes())


@pytest.mark.parametrize(("windows", "state"), [([[256, 4, 16]], "passed"), ([], "failed")])
def test_an_engine_without_its_windows_fails(windows: list[list[int]], state: str) -> None:
    one: dict[str, Any] = {"answers": ANSWERS}
    report = splits.check(CASES["push2"], {"deepseek": one, "deepseek twin": one, "push2": one | {"windows": windows}})
    assert report.state == state
    assert (report.equal_best, report.first_apart) == (1.0, 0.0)


def test_experts_are_moved_until_no_rank_has_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    experts = shapes()["deepseek"].experts
    start = [*range(experts), *range(split_cases.REDUNDANT)]
    twice, moved = [1, *start[1:]], [1, 0, *start[2:]]
    found = iter([start, twice, moved])
    calls: list[str] = []

    class Llm:
        def generate(self, *_: object, **__: object) -> None: ...

        def collective_rpc(self, method: str) -> list[list[int]]:
            calls.append(method)
            return [next(found) if method == "experts_in_places" else []]

    assert splits.move_experts(Llm(), ENGINES["moved"])["places"] == moved
    assert calls == [*["experts_in_places"] * 3, "stop_moving"]


def test_the_process_of_a_rank_is_its_worker_or_its_engine(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    assert processes(log) == {0: 8, 1: 10}
