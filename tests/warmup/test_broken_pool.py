"""A pool of compiling processes that breaks while it is still being filled."""

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from fp8moe_plugin.plan.keys import KernelKey
from warmup import kernels
from warmup.report import State


def test_kernels_that_cannot_be_handed_over_have_failed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(kernels.ProcessPoolExecutor):
        def submit(self, *arguments: object, **named: object) -> None:  # type: ignore[override]
            raise BrokenProcessPool("a process ended while others were being started")

    monkeypatch.setattr(kernels, "ProcessPoolExecutor", Broken)
    reports = kernels.compile_missing({KernelKey("combine"): "why", KernelKey("count_experts"): "why"})
    assert [report.state for report in reports] == [State.FAILED] * 2
    assert all("a compiling process was killed" in (report.detail or "") for report in reports)
