"""The result of `fp8moe-warmup compare`, as a table and as one line. Needs neither torch nor vLLM."""

import statistics
from collections.abc import Iterator
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from fp8moe_plugin import terminal
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
CANDIDATE, BASELINE = "candidate", "baseline"  # two running servers
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
    url: str | None = None  # of a running server
    ready_s: float | None = None
    reading_s: float | None = None
    perplexity: float | None = None
    # Against the reference; intervals cover 95%.
    perplexity_percent: Interval | None = None
    divergence: Interval | None = None  # KL(reference || this) in nats per token
    same_token: Interval | None = None  # share of positions
    task_scores: dict[str, float] = {}  # by metric, the mean over the documents of the task
    task_changes: dict[str, Interval] = {}  # minus the baseline's
    first_token_ms: Timing | None = None
    tokens_per_s: dict[int, Timing] = {}  # by the number of sequences that are decoded
    error: str | None = None
    log: str | None = None  # its output, kept if it failed and wrote something


class Outcome(StrEnum):
    MET = "met"
    NOT_MET = "NOT MET"
    NOT_SHOWN = "NOT SHOWN"  # the interval contains the limit
    NOT_MEASURED = "NOT MEASURED"  # or in one round, which has no interval


class Limit(Part):
    """A figure and its limit, which is met if all of the 95% interval is on the right side."""

    option: str
    limit: float
    figure: str
    found: Interval | None
    outcome: Outcome

    def __str__(self) -> str:
        found = self.found and f": {self.found.value:.3g} [{self.found.low:.3g}, {self.found.high:.3g}]"
        return f"{self.option} {self.limit:g} {self.outcome}: {self.figure}{found or ''}"


class CompareResult(Part):
    """Engines on one checkpoint and one machine, or two servers; readings are compared with that of `reference`."""

    date: str  # UTC, ISO 8601
    gpu: str | None  # None on a CPU, where the times say nothing about a GPU, and of servers
    vllm: str | None  # None of servers
    model: str | None  # None of servers
    twin: str | None  # the checkpoint of the engine `bf16`
    parallel: str | None  # None of servers
    text: str
    text_sha256: str
    windows: int | None = None
    window_tokens: int
    vocabulary: int | None = None  # tokens
    task: str | None = None  # of lm-eval
    listed_tokens: int  # most likely tokens at each position, over which `divergence` is computed
    prompt_tokens: int  # of the prompt whose first token is timed
    in_turns: bool | None = None  # all engines at once, started together; else one after the other
    reference: str | None = None
    engines: list[EngineResult]
    divergence_over_fp8: Interval | None = None  # ours minus that of vLLM's fp8, both from BF16
    verdict: str = ""
    limits: list[Limit] = []

    def engine(self, name: str) -> EngineResult | None:
        """Returns the engine of this name, if it is compared and has not failed."""
        return next((engine for engine in self.engines if engine.name == name and not engine.error), None)

    @property
    def servers(self) -> bool:
        return self.ours.url is not None

    @property
    def ours(self) -> EngineResult:
        """Returns the engine that is compared with the others."""
        return next(engine for engine in self.engines if engine.name in (OURS, CANDIDATE))

    @property
    def peer(self) -> EngineResult | None:
        """Returns the engine whose speed is compared with that of the first."""
        return self.engine(FP8) or self.engine(BF16) or self.engine(BASELINE)

    @property
    def failed(self) -> str:
        """Returns the names of the engines that failed, as `a and b`; empty if none did."""
        return " and ".join(engine.name for engine in self.engines if engine.error)

    @property
    def passed(self) -> bool:
        return all(limit.outcome == Outcome.MET for limit in self.limits)


def compare_readings(result: CompareResult, readings: dict[str, Reading]) -> None:
    """Fill in the comparison of each engine's reading with BF16, else with vLLM's fp8, or with the baseline."""
    result.reference = next((name for name in (BF16, FP8, BASELINE) if name in readings), None)
    for name, reading in readings.items():
        result.windows, result.window_tokens = reading.windows.shape
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
    """Returns one row per figure and one column per engine, then errors and the verdict."""
    rows = [("", [engine.name for engine in result.engines])]
    rows += [(label, cells) for label, cells in _figures(result) if any(cell != NONE for cell in cells)]
    figures = terminal.table("<" + ">" * len(result.engines), ((label, *cells) for label, cells in rows))
    failed = [
        f"{e.name} failed: {e.error}{f' (its output: {e.log})' if e.log else ''}" for e in result.engines if e.error
    ]
    limits = [*map(str, result.limits), f"Limits: {'passed' if result.passed else 'FAILED'}"] if result.limits else []
    return "\n".join([*_about(result), "", figures, "", *failed, *_unknown_text(result), result.verdict, *limits])


def _unknown_text(result: CompareResult) -> list[str]:
    """Returns a warning if the model is worse than guessing."""
    found, size = [e.perplexity for e in result.engines if e.perplexity is not None], result.vocabulary
    if not found or size is None or min(found) < size:
        return []
    return [
        terminal.fit(
            f"This text says little: the model expects it less than chance would, of {size:,} tokens. Give one that it "
            "knows with --text.",
            indent=2,
        )
    ]


def _about(result: CompareResult) -> list[str]:
    where = result.gpu or "a CPU: the times say nothing about a GPU"
    turns = "all at once, timed in turns" if result.in_turns else "one after the other"
    lines = [f"{shown_text(result.model or '')} on {where}, vLLM {result.vllm}; {turns}"]
    if result.servers:
        lines = [f"{engine.name}: {shown_text(engine.url or '')}" for engine in result.engines]
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
    for metric in sorted({metric for engine in engines for metric in engine.task_scores}):
        yield f"{result.task} {metric}", [_number(engine.task_scores.get(metric), ".4f") for engine in engines]
        yield from _intervals(f"  minus {BASELINE}", "+.4f", [engine.task_changes.get(metric) for engine in engines])
    first = f"first token of {'about ' * result.servers}{result.prompt_tokens:,}, ms"
    yield from _timings(first, ".2f", [engine.first_token_ms for engine in engines])
    for count in sorted({count for engine in engines for count in engine.tokens_per_s}):
        label = f"tokens/s, {count} sequence{'s' * (count > 1)}"
        yield from _timings(label, ",.0f", [engine.tokens_per_s.get(count) for engine in engines], 1e3 * count)
    ready = "ready, s" + " (started together)" * bool(result.in_turns)
    yield ready, [_number(engine.ready_s, ".1f") for engine in engines]


def _intervals(label: str, form: str, found: list[Interval | None]) -> Iterator[Row]:
    """Yields a row of means or medians, and one of their intervals."""
    yield label, [_number(None if of is None else of.value, form) for of in found]
    yield "", [NONE if of is None else f"[{of.low:{form}}, {of.high:{form}}]" for of in found]


def _timings(label: str, form: str, found: list[Timing | None], rate: float | None = None) -> Iterator[Row]:
    """Yields a row of values, and one of their intervals of several rounds: of times, or of `rate` / time."""
    yield label, [_number(None if of is None else of.value, form) for of in found]
    ends = [None if of is None else median_time(of.rounds_ms) for of in found]
    pairs = [of and ((rate / of.high, rate / of.low) if rate else (of.low, of.high)) for of in ends]
    yield "", [f"[{of[0]:{form}}, {of[1]:{form}}]" if of else NONE for of in pairs]


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def verdict(result: CompareResult) -> str:
    """Returns a line each about accuracy, speed and start of the first engine, relative to the others."""
    ours, peer = result.ours, result.peer
    if ours.error:
        return f"Verdict: none, as {result.failed} failed."
    if peer is None:
        return f"Verdict: none, as {ours.name} answers, but no other engine does."
    timed = result.gpu or result.servers
    return (
        "\n".join([*_accuracy(result, ours), *_task(result, ours), *(_speed(ours, peer) if timed else [])])
        or "Nothing was measured."
    )


def _accuracy(result: CompareResult, ours: EngineResult) -> Iterator[str]:
    if ours.divergence is None or ours.same_token is None:
        return
    same, kl = f"{ours.same_token.value:.1%}", f"{ours.divergence.value:#.2g}"
    over, peer, word = result.divergence_over_fp8, result.engine(FP8), ""
    if over and peer and peer.divergence and peer.same_token:
        same, kl = f"{same} ({FP8}: {peer.same_token.value:.1%})", f"{kl} ({FP8}: {peer.divergence.value:#.2g})"
        closer = ours.name if over.high < 0 else FP8 if over.low > 0 else None
        word = f"; {closer} is closer" if closer else "; the two differ by no more than chance"
    yield f"Accuracy: {ours.name} predicts the same token as {result.reference} at {same} of positions."
    yield f"  Its probabilities differ (KL divergence) by {kl} nats per token{word}."


def _task(result: CompareResult, ours: EngineResult) -> Iterator[str]:
    for metric, change in ours.task_changes.items():
        doubt = " (within noise)" * (change.low <= 0 <= change.high)
        score = f"{ours.task_scores[metric]:.4f}, {change.value:+.4f} over {BASELINE}{doubt}"
        yield f"Task: {metric} of {ours.name} in {result.task} is {score}."


def _speed(ours: EngineResult, peer: EngineResult) -> Iterator[str]:
    if ours.first_token_ms and peer.first_token_ms:
        yield f"Speed: first token {_times(ours.first_token_ms, peer.first_token_ms)} as fast as {peer.name}."
    counts = [count for count in ours.tokens_per_s if count in peer.tokens_per_s]
    ratios = [f"{_times(ours.tokens_per_s[count], peer.tokens_per_s[count])} with {count}" for count in counts]
    if ratios:
        yield terminal.fit(f"  Tokens per second, by the number of sequences: {', '.join(ratios)}.", indent=2)
    if ours.ready_s and peer.ready_s:
        yield f"Start: ready after {ours.ready_s:.0f} s, {peer.name} after {peer.ready_s:.0f} s."


def _times(ours: Timing, peer: Timing) -> str:
    """Returns the speedup, marked with what a reader must not conclude from it."""
    value = statistics.median(peer.rounds_ms) / statistics.median(ours.rounds_ms)
    found = speedup(ours.rounds_ms, peer.rounds_ms)
    doubt = " (one round)" if found is None else " (within noise)" * (found.low <= 1 <= found.high)
    return f"{value:.2f} times{doubt}"
