"""Which figures meet a limit: only those whose whole interval does."""

import pytest

from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare.intervals import Interval
from fp8moe_plugin.compare.limits import check_limits
from fp8moe_plugin.compare.result import BASELINE, BF16, CANDIDATE, FP8, EngineResult, Outcome, table, timing
from tests.compare.test_result import compared


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [(0.003, Outcome.MET), (0.0029, Outcome.NOT_SHOWN), (0.0011, Outcome.NOT_SHOWN), (0.0009, Outcome.NOT_MET)],
)
def test_the_whole_interval_of_the_divergence_meets_its_limit(limit: float, outcome: Outcome) -> None:
    result = compared({OURS: 0.1, BF16: 0})
    result.engines[0].divergence = Interval(value=0.002, low=0.001, high=0.003)
    result.limits = check_limits(result, limit, None)
    assert [found.outcome for found in result.limits] == [outcome]
    assert result.passed == (outcome == Outcome.MET)
    last = f"Limits: {'passed' if result.passed else 'FAILED'}"
    assert table(result).splitlines()[-2:] == [
        f"--max-kl {limit:g} {outcome}: KL divergence from bf16: 0.002 [0.001, 0.003]", last
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [(1.4, Outcome.MET), (1.5, Outcome.MET), (1.6, Outcome.NOT_MET)],
)
def test_each_speed_has_the_limit(limit: float, outcome: Outcome) -> None:
    result = compared({OURS: 0.1, FP8: 0})  # 1.5 times as fast
    for engine, ms in zip(result.engines, (2.0, 3.0), strict=True):
        engine.tokens_per_s = {1: timing([ms] * 3, 1), 64: timing([ms, 9.0, 0.1], 64)}
    found = check_limits(result, None, limit)
    assert [of.outcome for of in found] == [outcome, outcome, Outcome.NOT_SHOWN]
    assert found[1].figure == "tokens/s with 1, times fp8's"


def test_what_was_not_measured_meets_no_limit() -> None:
    result = compared({OURS: 0.1, FP8: 0})
    result.engines[0].divergence = None
    for engine in result.engines:
        engine.first_token_ms, engine.tokens_per_s = timing([2.0]), {}  # one round
    found = check_limits(result, 1, 0.1)
    assert [of.outcome for of in found] == [Outcome.NOT_MEASURED] * 2
    result.engines = [EngineResult(name=OURS)]
    assert [of.outcome for of in check_limits(result, 1, 0.1)] == [Outcome.NOT_MEASURED] * 2


@pytest.mark.parametrize(
    ("failed", "kl", "speed"),
    [
        (BASELINE, "KL divergence, as baseline failed", "speed, as baseline failed"),
        (CANDIDATE, "KL divergence, as candidate failed", "speed, times baseline's, as candidate failed"),
    ],
)
def test_a_server_that_failed_is_named(failed: str, kl: str, speed: str) -> None:
    result = compared({OURS: 0.1, BF16: 0})
    result.reference = None
    result.engines = [EngineResult(name=CANDIDATE), EngineResult(name=BASELINE)]
    for engine in result.engines:
        engine.error = "no answer" if engine.name == failed else None
    assert [str(of) for of in check_limits(result, 0.01, 0.9)] == [
        f"--max-kl 0.01 NOT MEASURED: {kl}", f"--min-speed 0.9 NOT MEASURED: {speed}"
    ]  # fmt: skip


def test_a_server_is_compared_with_the_baseline() -> None:
    result = compared({OURS: 0.1, BF16: 0})
    for engine, name in zip(result.engines, (CANDIDATE, BASELINE), strict=True):
        engine.name, engine.url = name, f"http://{name}:8000"
    result.reference = BASELINE
    found = check_limits(result, 1, 1)
    assert all(of.outcome == Outcome.MET for of in found[:2])
    assert "KL divergence from baseline" in str(found[0])
    assert table(result).startswith("candidate: http://candidate:8000\nbaseline: http://baseline:8000\n")
