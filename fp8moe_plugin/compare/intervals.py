"""95% intervals from a bootstrap: for differences of readings over windows of a text, and for times over rounds."""

from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

DRAWS = 10_000
LEAST = 1e-9  # of the probability of all tokens that are not listed, which is a difference of rounded sums

Floats = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
Ids = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


class Interval(BaseModel):
    """A mean or a median, and the 95% interval around it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float


class Reading(NamedTuple):
    """An engine's log-probabilities for `windows` of a text, at every token but the first of each window.

    The last dimension holds the next token of the text, then the most likely tokens in descending order.
    """

    windows: Ids  # [n, length]
    tokens: Ids  # [n, length - 1, 1 + listed]
    logprobs: Floats  # the same shape; natural logarithms

    @property
    def losses(self) -> Floats:
        """Returns nats per token, float64 [n, length - 1]."""
        return -self.logprobs[..., 0].astype(np.float64)


def bootstrap(values: Floats) -> Interval:
    """Returns the mean of one value per window, [n]. For differences of two engines, pair them by window."""
    return _interval(values.mean(), _samples(values).mean(1))


def median_time(rounds_ms: list[float]) -> Interval | None:
    """Returns the median, or None for one round, which has no interval."""
    return _interval(np.median(rounds_ms), _medians(rounds_ms)) if len(rounds_ms) > 1 else None


def speedup(rounds_ms: list[float], others_ms: list[float]) -> Interval | None:
    """Returns the speedup of the first over the second, by their medians, or None if either has one round."""
    if min(len(rounds_ms), len(others_ms)) < 2:
        return None
    drawn = _medians(others_ms, seed=1) / _medians(rounds_ms)
    return _interval(np.median(others_ms) / np.median(rounds_ms), drawn)


def _medians(rounds_ms: list[float], seed: int = 0) -> Floats:
    """Returns the median of each sample, [DRAWS]."""
    medians: Floats = np.median(_samples(np.array(rounds_ms), seed), 1)
    return medians


def _samples(values: Floats, seed: int = 0) -> Floats:
    """Returns samples of n values, drawn with replacement, [DRAWS, n]."""
    return values[np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))]


def _interval(value: np.floating, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value=float(value), low=float(low), high=float(high))


def perplexity(reading: Reading) -> float:
    return float(np.exp(reading.losses.mean()))


def perplexity_change(losses: Floats, others: Floats) -> Interval:
    """Returns the increase of one perplexity over another in percent, from mean losses per window, [n]."""
    found = bootstrap(losses - others)
    value, low, high = (100 * float(np.expm1(nats)) for nats in (found.value, found.low, found.high))
    return Interval(value=value, low=low, high=high)


def same_token(reading: Reading, reference: Reading) -> Floats:
    """Returns the share of positions at which both have the same most likely token, by window, [n]."""
    shares: Floats = (reading.tokens[..., 1] == reference.tokens[..., 1]).mean(1)
    return shares


def divergence(reading: Reading, reference: Reading) -> Floats:
    """Returns KL(reference || reading) in nats per token, by window, [n].

    The distributions are over the tokens that both list, with all other tokens merged into one. The result is at most
    the divergence over all tokens, and close to it if the listed tokens are likely.
    """
    windows = zip(reading.tokens, reading.logprobs, reference.tokens, reference.logprobs, strict=True)
    return np.array([_divergence(*window).mean() for window in windows])


def _divergence(tokens: Ids, logprobs: Floats, reference_tokens: Ids, reference_logprobs: Floats) -> Floats:
    """Returns the divergence at each position of one window; arguments are [positions, 1 + listed]."""
    unlisted_next = (reference_tokens[:, 1:] != reference_tokens[:, :1]).all(1)  # else it is there twice
    equal = reference_tokens[:, :, None] == tokens[:, None, :]
    common = equal.any(2)
    common[:, 0] &= unlisted_next
    theirs = reference_logprobs.astype(np.float64)
    ours = np.take_along_axis(logprobs, equal.argmax(2), axis=1).astype(np.float64)
    p, q = (np.where(common, np.exp(log), 0.0) for log in (theirs, ours))
    listed = np.where(common, p * (theirs - ours), 0.0).sum(1)
    rest, other_rest = (np.maximum(1 - x.sum(1), LEAST) for x in (p, q))
    nats: Floats = listed + rest * np.log(rest / other_rest)
    return nats
