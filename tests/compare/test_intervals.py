"""Divergence, agreement and perplexity of readings, against sums over a whole vocabulary; intervals of times."""

import numpy as np
import pytest

from fp8moe_plugin.compare.intervals import (
    Floats,
    Reading,
    bootstrap,
    divergence,
    median_time,
    perplexity,
    perplexity_change,
    same_token,
    speedup,
)

WINDOWS, LENGTH, VOCAB = 6, 20, 40


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def log_softmax(logits: Floats) -> Floats:
    found: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


BF16 = log_softmax(3 * random(0, WINDOWS, LENGTH - 1, VOCAB))
FP8 = log_softmax(BF16 + 0.1 * random(1, *BF16.shape))


def reading(logprobs: Floats, listed: int) -> Reading:
    """As an engine lists log-probabilities [windows, positions, vocab]."""
    text = np.random.default_rng(2).integers(VOCAB, size=(WINDOWS, LENGTH))
    tokens = np.concatenate((text[:, 1:, None], logprobs.argsort(-1)[..., : -listed - 1 : -1]), -1)
    return Reading(text, tokens, np.take_along_axis(logprobs, tokens, -1).astype(np.float32))


def whole(other: Floats, reference: Floats) -> Floats:
    found: Floats = (np.exp(reference) * (reference - other)).sum(-1).mean(1)
    return found


def test_the_divergence_of_whole_lists_is_that_over_the_vocabulary() -> None:
    found = divergence(reading(FP8, VOCAB), reading(BF16, VOCAB))
    assert found == pytest.approx(whole(FP8, BF16), rel=1e-4)
    assert (found > 1e-4).all()


def test_the_divergence_of_short_lists_is_less_but_not_much() -> None:
    found = divergence(reading(FP8, 12), reading(BF16, 12))
    assert (found < whole(FP8, BF16)).all()
    assert (found > 0.7 * whole(FP8, BF16)).all()


def test_divergence_merges_unlisted_tokens() -> None:
    """Ours lists 0, 1 and 2, the other 0, 1 and 3, and the text goes on with 3."""
    p, q = np.array([0.5, 0.2, 0.1, 0.05]), np.array([0.4, 0.3, 0.12, 0.04])
    tokens = np.array([[[3, 0, 1, 2]]]), np.array([[[3, 0, 1, 3]]])
    ours, other = (
        Reading(np.array([[0, 3]]), t, np.log(of[t]).astype(np.float32)) for of, t in zip((p, q), tokens, strict=True)
    )
    both, rest = [0, 1, 3], 1 - p[[0, 1, 3]].sum()
    expected = (p[both] * np.log(p[both] / q[both])).sum() + rest * np.log(rest / (1 - q[both].sum()))
    assert divergence(other, ours) == pytest.approx(expected, rel=1e-5)


def test_no_engine_diverges_from_itself() -> None:
    one = reading(BF16, 10)
    assert divergence(one, one) == pytest.approx(0, abs=1e-12)
    assert (same_token(one, one) == 1).all()
    assert perplexity_change(one.losses.mean(1), one.losses.mean(1)).value == 0


def test_the_same_token_is_that_which_is_most_likely() -> None:
    found = same_token(reading(FP8, 5), reading(BF16, 5))
    assert found == pytest.approx((FP8.argmax(-1) == BF16.argmax(-1)).mean(1))
    assert 0.5 < found.mean() < 1


def test_perplexity_is_of_the_tokens_of_the_text() -> None:
    one = reading(BF16, 3)
    next_token = np.take_along_axis(BF16, one.windows[:, 1:, None], -1)
    assert perplexity(one) == pytest.approx(np.exp(-next_token.mean()), rel=1e-5)


def test_an_interval_covers_what_chance_does_to_the_mean() -> None:
    values = random(3, 400)
    found = bootstrap(values)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 400**0.5, rel=0.1)
    assert found.low < found.value < found.high


def test_median_interval_narrows_with_more_rounds() -> None:
    few, many = (median_time([1.0, 2.0, 3.0, 4.0, 9.0] * times) for times in (1, 20))
    assert few
    assert many
    assert few.value == many.value == 3
    assert 1 <= few.low < many.low < 3 < many.high < few.high <= 9


@pytest.mark.parametrize(("others", "shown"), [([3.0, 3.1, 2.9, 3.0, 3.2], True), ([2.0, 1.5, 2.3, 2.1, 1.9], False)])
def test_a_speedup_is_shown_where_its_interval_does_not_hold_1(others: list[float], shown: bool) -> None:
    rounds = [2.0, 2.2, 1.8, 2.1, 1.9]
    found, inverse = speedup(rounds, others), speedup(others, rounds)
    assert found
    assert inverse
    assert found.value == pytest.approx(np.median(others) / 2)
    assert (found.low > 1) == shown
    assert found.low <= found.value <= found.high
    assert inverse.value == pytest.approx(1 / found.value)


def test_one_round_has_no_interval() -> None:
    assert median_time([2.0]) is None
    assert speedup([2.0], [3.0, 3.1]) is speedup([2.0, 2.1], [3.0]) is None
