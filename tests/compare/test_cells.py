"""How steps of an engine are timed."""

from types import SimpleNamespace

import pytest

from fp8moe_plugin.compare import cells
from fp8moe_plugin.compare.cells import SHORT, STEPS, Cell, VllmClock

DECODE = Cell("decode 2", 2, 0)


class FakeEngine(VllmClock):
    """Its steps take so many seconds, one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(step=self.step))
        monkeypatch.setattr(cells.time, "perf_counter", lambda: self.now)

    def step(self) -> str:
        self.now += self.seconds.pop(0)
        return "outputs"

    def generate(self, prompts: int, prompt_tokens: int, tokens: int) -> float:
        begin = self.now
        while self.seconds:
            assert self.llm.llm_engine.step() == "outputs"
        return (self.now - begin) * 1e3


def test_neither_the_prefill_nor_the_last_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(monkeypatch, [5.0] * SHORT + [0.01] * STEPS + [7.0])
    assert engine.measure(DECODE) == pytest.approx(10.0)


def test_all_steps_between_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow step is part of the mean."""
    engine = FakeEngine(monkeypatch, [5.0] * SHORT + [0.01] * (STEPS - 1) + [0.49, 7.0])
    assert engine.measure(DECODE) == pytest.approx(20.0)


def test_the_engine_has_its_own_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(monkeypatch, [0.01] * (SHORT + STEPS))
    step = engine.llm.llm_engine.step
    engine.measure(DECODE)
    assert engine.llm.llm_engine.step == step


def test_too_few_steps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an engine that decodes several tokens at once."""
    engine = FakeEngine(monkeypatch, [0.01] * 20)
    with pytest.raises(RuntimeError, match="the engine took 20 steps; 50 or more are timed"):
        engine.measure(DECODE)


def test_a_prefill_is_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(monkeypatch, [0.3, 0.2])
    assert engine.measure(Cell("prefill 1x128", 1, 128)) == pytest.approx(500.0)
