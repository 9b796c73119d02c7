"""The table, the verdict and the plot of a comparison."""

from pathlib import Path

import numpy as np
import pytest

from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare.intervals import Reading
from fp8moe_plugin.compare.plot import plot
from fp8moe_plugin.compare.result import (
    BF16,
    FP8,
    CompareResult,
    EngineResult,
    compare_readings,
    table,
    timing,
    verdict,
)

MS = {OURS: 2.0, FP8: 3.0, BF16: 5.0}
SEQUENCES = (1, 64)


def reading(apart: float) -> Reading:
    """The first of two tokens has log-odds of 1, and those of windows around it differ, by so much more."""
    windows = np.zeros((8, 5), int)
    odds = 1 + apart * (1 + np.arange(8) / 8)[:, None] * np.ones((8, 4))
    logprobs = -np.log1p(np.exp(np.stack((-odds, -odds, odds), -1)))
    tokens = np.where(odds[..., None] > 0, [0, 0, 1], [0, 1, 0])
    return Reading(windows, tokens, np.where(tokens == 0, logprobs[..., :1], logprobs[..., 2:]))


def compared(apart: dict[str, float], *failed: str, gpu: str | None = "NVIDIA H200") -> CompareResult:
    names = [*apart, *failed]
    result = CompareResult(
        date="2026-11-24T20:00:00+00:00", gpu=gpu, vllm="0.25.1", model="/models/small-fp8", twin="/models/small",
        parallel="--tp 1", text="english.txt", text_sha256="0" * 64, window_tokens=5, listed_tokens=2,
        prompt_tokens=1024, in_turns=True, engines=[EngineResult(name=name) for name in names],
    )  # fmt: skip
    for engine in result.engines:
        if engine.name in failed:
            engine.error, engine.log = "OutOfMemoryError: no memory", "/tmp/fp8.log"
            continue
        engine.ready_s, engine.first_token_ms = 10 * MS[engine.name], timing([2 * MS[engine.name]] * 3)
        engine.tokens_per_s = {n: timing([MS[engine.name], 9, 0.1], n) for n in SEQUENCES}
    compare_readings(result, {name: reading(by) for name, by in apart.items()})
    result.verdict = verdict(result)
    return result


def test_a_rate_is_of_the_median_step() -> None:
    found = timing([2.0, 9.0, 0.1], 64)
    assert (found.value, found.rounds_ms) == (32000, [2.0, 9.0, 0.1])
    assert timing([3.0, 1.0, 2.0]).value == 2


def test_engines_are_compared_with_bf16_and_with_each_other() -> None:
    result = compared({OURS: 0.1, FP8: 0.3, BF16: 0})
    ours, peer, bf16 = result.engines
    assert (result.reference, result.windows, bf16.divergence) == (BF16, 8, None)
    assert ours.divergence
    assert peer.divergence
    assert 0 < ours.divergence.value < peer.divergence.value
    assert result.divergence_over_fp8
    difference = ours.divergence.value - peer.divergence.value
    assert result.divergence_over_fp8.value == pytest.approx(difference)
    assert ours.same_token
    assert ours.same_token.value == 1
    assert ours.perplexity
    assert bf16.perplexity
    assert ours.perplexity_percent
    assert ours.perplexity_percent.value == pytest.approx(100 * (ours.perplexity / bf16.perplexity - 1))


@pytest.mark.parametrize(
    ("ours", "peer", "word"),
    [
        (0.1, 0.3, "fp8moe is closer"),
        (0.3, 0.1, "fp8 is closer"),
        (0.2, 0.2, "the two differ by no more than chance"),
    ],
)
def test_the_verdict_beside_a_twin(ours: float, peer: float, word: str) -> None:
    text = compared({OURS: ours, FP8: peer, BF16: 0}).verdict
    assert "by 0." in text
    assert text.endswith("Start: ready after 20 s, fp8 after 30 s.")
    assert f"; {word}.\n" in text
    assert "predicts the same token as bf16 at 100.0% (fp8: 100.0%) of positions." in text
    assert "Speed: first token 1.50 times as fast as fp8.\n" in text
    rates = "number of sequences: 1.50 times (within noise) with 1, 1.50 times (within noise) with 64."
    assert rates in " ".join(text.split())


def test_the_verdict_without_a_twin_is_about_vllms_fp8() -> None:
    result = compared({OURS: 0.1, FP8: 0})
    assert result.reference == FP8
    assert "fp8moe predicts the same token as fp8" in result.verdict


def test_on_a_cpu_the_verdict_says_nothing_about_times() -> None:
    result = compared({OURS: 0.1, BF16: 0}, gpu=None)
    assert "fp8moe predicts the same token as bf16" in result.verdict
    assert "times" not in result.verdict
    assert "times say nothing" in table(result)


def test_figures_of_the_others_stay_if_an_engine_fails() -> None:
    result = compared({OURS: 0.1, BF16: 0}, FP8)
    assert "first token 2.50 times as fast as bf16" in result.verdict
    assert "fp8 failed: OutOfMemoryError: no memory (its output: /tmp/fp8.log)" in table(result)
    assert compared({FP8: 0.1, BF16: 0}, OURS).verdict == "Verdict: none, as fp8moe failed."
    assert compared({BF16: 0}, OURS, FP8).verdict == "Verdict: none, as fp8moe and fp8 failed."
    assert "no other engine" in compared({OURS: 0}, FP8).verdict


def test_before_anything_is_measured_the_verdict_says_so() -> None:
    result = compared({OURS: 0.1, FP8: 0})
    result.engines = [EngineResult(name=name) for name in (OURS, FP8)]
    assert verdict(result) == "Nothing was measured."


def test_the_table_has_every_figure() -> None:
    text = table(compared({OURS: 0.1, FP8: 0.3, BF16: 0}))
    rows = text.splitlines()
    (rates,) = (row for row in rows if row.startswith("tokens/s, 64 sequences"))
    assert rates.split()[3:] == ["32,000", "21,333", "12,800"]
    (first,) = (row for row in rows if row.startswith("first token of 1,024, ms"))
    assert first.split()[-3:] == ["4.00", "6.00", "10.00"]
    assert any(row.startswith("KL from bf16") and row.endswith(" -") for row in rows)
    assert sum("[" in row for row in rows) == 6  # intervals: of accuracy, the first token, and two rates
    assert "[7,111, 640,000]" in rows[rows.index(rates) + 1]


def test_one_round_has_no_interval() -> None:
    result = compared({OURS: 0.1, FP8: 0})
    for engine in result.engines:
        engine.first_token_ms, engine.tokens_per_s = timing([2.0]), {1: timing([3.0], 1)}
    rows = table(result).splitlines()
    (first,) = (number for number, row in enumerate(rows) if row.startswith("first token"))
    assert [row.split()[-1] for row in rows[first : first + 3]] == ["2.00", "333", "30.0"]
    assert "first token 1.00 times (one round) as fast as fp8" in verdict(result)


def test_a_text_that_the_model_does_not_know_is_named() -> None:
    result, words = compared({OURS: 0.1, FP8: 0}), "less than chance would"
    assert words not in table(result)
    result.vocabulary = 2
    assert words not in table(result)
    for engine in result.engines:
        engine.perplexity = 2.5
    assert f"{words}, of 2 tokens" in table(result)


@pytest.mark.parametrize("failed", [(), (FP8,), (OURS, FP8)])
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_plot(tmp_path: Path, failed: tuple[str, ...], suffix: str) -> None:
    result = compared({name: 0.1 for name in (OURS, FP8, BF16) if name not in failed}, *failed)
    paths = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for path in paths:
        plot(result, path)
    first, again = (path.read_bytes() for path in paths)
    assert first == again
    assert len(first) > 5000
