"""The result of `fp8moe-warmup compare`, as a table and as one line. Needs neither torch nor vLLM."""

import statistics
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.compare.intervals import (
    Interval,
    Reading,
    bootstrap,
    divergence,
    median_time,
    perplexity,
    perplexity_change,
    same_token,
    speedup,
)
from fp8moe_plugin.quoting import shown_text

FP8, BF16 = "fp8", "bf16"
LABEL, WIDTH = 36, 20  # characters of the columns of the table
NONE = "-"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Timing(Part):
    """One time of each round. `value` is their median in milliseconds, or tokens per second from it."""

    value: float
    rounds_ms: list[float]  # of a decode step, or until the first token


class EngineResult(Part):
    """The result of one engine. After an `error` it has the earlier measurements; the others are None or empty."""

    name: str
    ready_s: float | None = None
    reading_s: float | None = None
    perplexity: float | None = None
    # Against the reference; intervals cover 95%.
    perplexity_percent: Interval | None = None
    divergence: Interval | None = None  # KL(reference || this) in nats per token
    same_token: Interval | None = None  # share of positions
    first_token_ms: Timing | None = None
    tokens_per_s: dict[int, Timing] = {}  # by the number of sequences that are decoded
    error: str | None = None
    log: str | None = None  # its output, kept if it failed


class CompareResult(Part):
    """Engines on one checkpoint and one machine; the others' readings are compared with that of `reference`."""

    date: str  # UTC, ISO 8601
    gpu: str | None  # None on a CPU, where the times say nothing about a GPU
    vllm: str
    model: str
    twin: str | None  # the checkpoint of the engine `bf16`
    parallel: str
    text: str
    text_sha256: str
    windows: int | None = None
    window_tokens: int
    vocabulary: int | None = None  # tokens
    listed_tokens: int  # most likely tokens at each position, over which `divergence` is computed
    prompt_tokens: int  # of the prompt whose first token is timed
    in_turns: bool | None = None  # all engines at once, started together; else one after the other
    reference: str | None = None
    engines: list[EngineResult]
    divergence_over_fp8: Interval | None = None  # ours minus that of vLLM's fp8, both from BF16
    verdict: str = ""

    def engine(self, name: str) -> EngineResult | None:
        """Returns the engine of this name, if it is compared and has not failed."""
        return next((engine for engine in self.engines if engine.name == name and not engine.error), None)


def compare_readings(result: CompareResult, readings: dict[str, Reading]) -> None:
    """Fill in the comparison of each engine's reading with BF16, or with vLLM's fp8 without a twin."""
    result.reference = next((name for name in (BF16, FP8) if name in readings), None)
    for name, reading in readings.items():
        result.windows = len(reading.windows)
        engine = next(engine for engine in result.engines if engine.name == name)
        engine.perplexity = perplexity(reading)
        if result.reference is None or name == result.reference:
            continue
        reference = readings[result.reference]
        engine.perplexity_percent = perplexity_change(reading.losses.mean(1), reference.losses.mean(1))
        engine.divergence = bootstrap(divergence(reading, reference))
        engine.same_token = bootstrap(same_token(reading, reference))
    if {OURS, FP8, BF16} <= set(readings):
        ours, peer = (divergence(readings[name], readings[BF16]) for name in (OURS, FP8))
        result.divergence_over_fp8 = bootstrap(ours - peer)


def timing(rounds_ms: list[float], sequences: int | None = None) -> Timing:
    """Returns the median time, or the tokens per second of decode steps of `sequences`."""
    median = statistics.median(rounds_ms)
    value = median if sequences is None else 1e3 * sequences / median
    return Timing(value=round(value, 3), rounds_ms=[round(ms, 4) for ms in rounds_ms])


def table(result: CompareResult) -> str:
    """Returns one row per figure and one column per engine, at most 100 columns wide, then errors and the verdict."""
    rows = [("", [engine.name for engine in result.engines])]
    rows += [(label, cells) for label, cells in _figures(result) if any(cell != NONE for cell in cells)]
    lines = [label.ljust(LABEL) + "".join(cell.rjust(WIDTH) for cell in cells) for label, cells in rows]
    failed = [f"{e.name} failed: {e.error} (its output: {e.log})" for e in result.engines if e.log]
    failed += [f"{e.name}: {e.error}" for e in result.engines if e.error and not e.log]
    return "\n".join([*_about(result), "", *lines, "", *failed, *_unknown_text(result), result.verdict])


def _unknown_text(result: CompareResult) -> list[str]:
    """Returns a warning if the model is worse than guessing."""
    found, size = [e.perplexity for e in result.engines if e.perplexity is not None], result.vocabulary
    if not found or size is None or min(found) < size:
        return []
    return [
        f"This text says little: the model expects it less than chance would, of {size:,} tokens. Give one that it",
        "knows with --text.",
    ]


def _about(result: CompareResult) -> list[str]:
    where = result.gpu or "a CPU: the times say nothing about a GPU"
    turns = "all at once, timed in turns" if result.in_turns else "one after the other"
    lines = [f"{shown_text(result.model)} on {where}, vLLM {result.vllm}; {turns}"]
    if result.windows:
        read = f"{result.windows} windows of {result.window_tokens} tokens"
        lines.append(f"Text: {shown_text(result.text)}, {read}")
    return [*lines, "Brackets: 95% intervals, from a bootstrap over windows of the text or rounds of the timing"]


Row = tuple[str, list[str]]  # its label, and a cell for each engine


def _figures(result: CompareResult) -> Iterator[Row]:
    """Yields the rows of the table."""
    engines, reference = result.engines, result.reference
    yield "perplexity", [_number(engine.perplexity, ".4f") for engine in engines]
    yield from _intervals(f"  over {reference}, %", "+.3f", [engine.perplexity_percent for engine in engines])
    yield from _intervals(f"KL from {reference}, nats per token", ".5f", [engine.divergence for engine in engines])
    yield from _intervals(f"same most likely token as {reference}", ".2%", [engine.same_token for engine in engines])
    first = f"first token of {result.prompt_tokens:,}, ms"
    yield from _intervals(first, ".2f", [_milliseconds(engine.first_token_ms) for engine in engines])
    for count in sorted({count for engine in engines for count in engine.tokens_per_s}):
        label = f"tokens/s, {count} sequence{'s' * (count > 1)}"
        yield from _intervals(label, ",.0f", [_tokens_per_s(engine, count) for engine in engines])
    ready = "ready, s" + " (started together)" * bool(result.in_turns)
    yield ready, [_number(engine.ready_s, ".1f") for engine in engines]


def _intervals(label: str, form: str, found: list[Interval | None]) -> Iterator[Row]:
    """Yields a row of means or medians, and one of their intervals."""
    yield label, [_number(None if of is None else of.value, form) for of in found]
    yield "", [NONE if of is None else f"[{of.low:{form}}, {of.high:{form}}]" for of in found]


def _milliseconds(found: Timing | None) -> Interval | None:
    return median_time(found.rounds_ms) if found else None


def _tokens_per_s(engine: EngineResult, count: int) -> Interval | None:
    found = _milliseconds(engine.tokens_per_s.get(count))
    rate = 1e3 * count
    return Interval(value=rate / found.value, low=rate / found.high, high=rate / found.low) if found else None


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def verdict(result: CompareResult) -> str:
    """Returns one line: our reading of the text and our speed compared with vLLM's fp8 or BF16."""
    ours = result.engine(OURS)
    if ours is None:
        return f"Verdict: none, as {OURS} has failed."
    peer = result.engine(FP8) or result.engine(BF16)
    if peer is None:
        return f"Verdict: none, as {OURS} answers, but no other engine does."
    parts = [*_accuracy(result, ours), *(_speed(ours, peer) if result.gpu else [])]
    return f"Verdict: {'; '.join(parts) or 'nothing was measured'}."


def _accuracy(result: CompareResult, ours: EngineResult) -> list[str]:
    if ours.divergence is None or ours.same_token is None:
        return []
    kl, same = f"{ours.divergence.value:#.2g}", f"{ours.same_token.value:.1%}"
    over, peer = result.divergence_over_fp8, result.engine(FP8)
    if over is None or peer is None or peer.divergence is None or peer.same_token is None:
        apart = f"KL divergence of {OURS} from {result.reference} {kl} nats per token"
        return [apart, f"same most likely token at {same} of positions"]
    word = f"{OURS} is closer" if over.high < 0 else f"{FP8} is closer" if over.low > 0 else "no difference shown"
    apart = f"KL divergence from {result.reference} {kl} nats per token, {FP8} {peer.divergence.value:#.2g} ({word})"
    return [apart, f"same most likely token at {same} of positions, {FP8} {peer.same_token.value:.1%}"]


def _speed(ours: EngineResult, peer: EngineResult) -> list[str]:
    parts = []
    if ours.first_token_ms and peer.first_token_ms:
        parts.append(f"first token {_times(ours.first_token_ms, peer.first_token_ms, 'as fast as ' + peer.name)}")
    ratios: list[str] = []
    for count in (n for n in ours.tokens_per_s if n in peer.tokens_per_s):
        what = f"with {count}" if ratios else f"its tokens per second with {count}"
        ratios.append(_times(ours.tokens_per_s[count], peer.tokens_per_s[count], what))
    if ratios:
        parts.append(f"{', '.join(ratios)} sequences")
    if ours.ready_s and peer.ready_s:
        parts.append(f"ready after {ours.ready_s:.0f} s, {peer.name} {peer.ready_s:.0f} s")
    return parts


def _times(ours: Timing, peer: Timing, what: str) -> str:
    found = speedup(ours.rounds_ms, peer.rounds_ms)
    return f"{found.value:.2f} times {what}" + " (no difference shown)" * (found.low <= 1 <= found.high)
