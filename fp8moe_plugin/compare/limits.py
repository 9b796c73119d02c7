"""Checks a comparison against limits, so that a rollout can depend on its exit status."""

from fp8moe_plugin.compare.intervals import Interval, speedup
from fp8moe_plugin.compare.result import CompareResult, EngineResult, Limit, Outcome

MAX_KL, MIN_SPEED = "--max-kl", "--min-speed"


def check_limits(result: CompareResult, max_kl: float | None, min_speed: float | None) -> list[Limit]:
    """Returns the figures to which the given limits apply, with the outcome of each."""
    ours, peer, found = result.ours, result.peer, []
    why = f", as {result.failed} failed" if result.failed else ""
    if max_kl is not None:
        kl = f"KL divergence from {result.reference}" if result.reference else "KL divergence"
        found.append(_limit(MAX_KL, max_kl, kl, ours.divergence, why))
    if min_speed is not None:
        times = f", times {peer.name}'s" if peer else ""
        found += [_limit(MIN_SPEED, min_speed, what + times, at, why) for what, at in _speedups(ours, peer).items()]
    return found


def _speedups(ours: EngineResult, peer: EngineResult | None) -> dict[str, Interval | None]:
    """Returns the speedup of the first token and of each number of sequences."""
    if peer is None or not ours.first_token_ms or not peer.first_token_ms:
        return {"speed": None}
    found = {"speed of the first token": speedup(ours.first_token_ms.rounds_ms, peer.first_token_ms.rounds_ms)}
    for count in sorted(ours.tokens_per_s.keys() & peer.tokens_per_s.keys()):
        rounds = (engine.tokens_per_s[count].rounds_ms for engine in (ours, peer))
        found[f"tokens/s with {count}"] = speedup(*rounds)
    return found


def _limit(option: str, limit: float, figure: str, found: Interval | None, why: str) -> Limit:
    """The whole interval must be on the right side of the limit: chance alone must not let a rollout pass.

    Args:
        why: added to the figure if it was not measured.
    """
    if found is None:
        outcome, figure = Outcome.NOT_MEASURED, figure + why
    else:
        low, high = (found.low, found.high) if option == MIN_SPEED else (-found.high, -found.low)
        bound = limit if option == MIN_SPEED else -limit
        outcome = Outcome.MET if low >= bound else Outcome.NOT_MET if high < bound else Outcome.NOT_SHOWN
    return Limit(option=option, limit=limit, figure=figure, found=found, outcome=outcome)
