"""Results files: one line per measured point, and nothing lost."""

import json
from pathlib import Path

import pytest

from benchmarks.report import report_text

ROOT = Path(__file__).parents[2]
RESULTS = sorted([*ROOT.glob("benchmarks/results/*.json"), *ROOT.glob("docs/experiments/results/*.json")])


def test_each_point_is_one_line() -> None:
    rows = [{"tokens": 1, "us": 2.5, "rounds": [1, 2]}, {"tokens": 2, "us": 3.5, "deeper": {"a": {"b": 1}}}]
    by_name = {"ours": {"ready_s": 1, "batches": {"1": {"ms": 2.0, "rounds": [1, 2]}, "8": {"ms": 3.0}}}}
    report = {"date": "2026-11-24", "rows": rows, "engines": by_name}
    text = report_text(report)
    assert json.loads(text) == report
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert all(json.dumps(row) in lines for row in rows)
    assert '"1": {"ms": 2.0, "rounds": [1, 2]}' in lines
    assert '"8": {"ms": 3.0}' in lines


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_results_are_written_so(path: Path) -> None:
    text = path.read_text()
    assert text == report_text(json.loads(text))
