"""A task of lm-eval with two servers; a stand-in takes the package's place."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8moe_plugin.compare import task
from fp8moe_plugin.compare.cells import Cell
from fp8moe_plugin.compare.intervals import Reading
from fp8moe_plugin.compare.measure import Cells, measure
from fp8moe_plugin.compare.result import BASELINE, CANDIDATE, CompareResult, EngineResult, table, verdict
from fp8moe_plugin.compare.turns import Engines
from fp8moe_plugin.errors import UnsupportedError
from warmup.__main__ import main

URLS = ["--url", "http://127.0.0.1:9", "--baseline", "http://127.0.0.1:9"]
DOCUMENTS = 8


def sample(document: int, way: str, **metrics: Any) -> dict[str, Any]:
    return {"doc_id": document, "filter": way, "metrics": [*metrics], "doc": {}, **metrics}


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """lm-eval is installed. Gets the arguments of its evaluations."""
    asked: list[dict[str, Any]] = []

    class TaskManager:
        def load(self, names: list[str]) -> dict[str, Any]:
            kinds = {"gsm8k": "generate_until", "arc_easy": "multiple_choice"}
            return {"tasks": {name: SimpleNamespace(OUTPUT_TYPE=kinds[name]) for name in names}}

    def simple_evaluate(model: str, **arguments: Any) -> dict[str, Any]:
        asked.append({"model": model, **arguments})
        return {"samples": {"gsm8k": [sample(0, "strict-match", exact_match=1.0)]}}

    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    tasks.TaskManager = TaskManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr(task, "find_spec", lambda name: name)
    return asked


def test_without_the_package_the_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *URLS, "--task", "gsm8k"]) == 1
    assert "--task needs lm-eval, which is not installed. Run `pip install" in capsys.readouterr().err


def test_a_task_needs_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--model", str(tmp_path), "--task", "gsm8k"])
    assert "--task is done by two running servers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [("arc_easy", "does not generate text .multiple_choice."), ("nonsense", "cannot be loaded: 'nonsense'")],
)
def test_a_task_that_a_server_cannot_do_is_refused(lm_eval: list[Any], name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        task.check_task(name)


def test_lm_eval_sends_text_to_the_server(lm_eval: list[dict[str, Any]]) -> None:
    task.check_task("gsm8k")
    found = task.evaluate("gsm8k", "http://canary:8000", "small")
    assert found["exact_match, strict-match"].tolist() == [1.0]
    (asked,) = lm_eval
    assert (asked["model"], asked["tasks"]) == ("local-completions", ["gsm8k"])
    arguments = asked["model_args"]
    assert (arguments["base_url"], arguments["model"]) == ("http://canary:8000/v1/completions", "small")
    assert arguments["tokenizer_backend"] is None


def test_scores_are_in_the_order_of_documents() -> None:
    samples = {
        "b": [sample(0, "none", acc=np.float64(0.5), text="x")],
        "a": [sample(1, "none", acc=0.0, text=1), sample(0, "none", acc=True), sample(0, "strict", acc=1)],
    }
    found = task.scores(samples)
    assert {metric: values.tolist() for metric, values in found.items()} == {"acc": [1, 0, 0.5], "acc, strict": [1]}


class Process:
    """A server that gives the right answer to the first documents."""

    log = Path("/logs/server.log")

    def __init__(self, right: int) -> None:
        self.right = right

    def start(self) -> None:
        pass

    def has_answered(self, timeout: float) -> bool:
        return True

    def wait_until_made(self, timeout: float) -> float:
        return 0.0

    def call(self, method: str, argument: Any, timeout: float) -> Any:
        if method == "evaluate":
            assert argument == "gsm8k"
            return {"exact_match": np.array([1.0] * self.right + [0.0] * (DOCUMENTS - self.right))}
        shape = (2, 2, 1 + argument) if method == "read" else ()
        return Reading(np.zeros((2, 3), int), np.zeros(shape, int), np.full(shape, -1.0)) if shape else 1.0

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (5, "Task: exact_match of candidate in gsm8k is 0.6250, -0.1250 over baseline (within noise)."),
        (0, "Task: exact_match of candidate in gsm8k is 0.0000, -0.7500 over baseline."),
    ],
)
def test_servers_are_compared_by_document(right: int, said: str) -> None:
    engines = [EngineResult(name=name, url="http://there") for name in (CANDIDATE, BASELINE)]
    result = CompareResult(
        date="", gpu=None, vllm=None, model=None, twin=None, parallel=None, text="", text_sha256="", window_tokens=3,
        listed_tokens=4, prompt_tokens=1024, task="gsm8k", engines=engines,
    )  # fmt: skip
    processes: Any = {CANDIDATE: Process(right), BASELINE: Process(6)}
    cells = Cells(Cell("first token", 1, 1024), (), rounds=3, most_rounds=3)
    measure(Engines(processes, 7, lambda line: None), cells, result, {})
    candidate, baseline = result.engines
    assert baseline.task_scores == {"exact_match": 0.75}
    assert baseline.task_changes == {}
    assert candidate.task_changes["exact_match"].value == (right - 6) / DOCUMENTS
    assert said in verdict(result)
    assert "gsm8k exact_match " in table(result)
