"""Runs engines on the text, times them in turns, and records each result at once."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8moe_plugin.compare.cells import Cell
from fp8moe_plugin.compare.intervals import Reading, bootstrap
from fp8moe_plugin.compare.process import EngineError
from fp8moe_plugin.compare.result import BASELINE, CompareResult, EngineResult, timing
from fp8moe_plugin.compare.task import Scores
from fp8moe_plugin.compare.turns import Engines

ENOUGH_S = 10.0


@dataclass(frozen=True)
class Cells:
    """The timed cells: the first token of a prompt, and decode steps of several numbers of sequences.

    Each in `rounds`, and in up to `most_rounds` as long as these take no more than ENOUGH_S: a host may be slow for a
    second, so that short cells vary most.
    """

    first_token: Cell
    decode: tuple[Cell, ...]
    rounds: int
    most_rounds: int

    @property
    def all(self) -> list[Cell]:
        return [self.first_token, *self.decode]


def measure(engines: Engines, cells: Cells, result: CompareResult, readings: dict[str, Reading]) -> None:
    """Start engines, read the text with them, time them, and end them. Fills in `result` and `readings`.

    Readings of earlier engines stay, and must be of the same tokens.
    """
    results = {engine.name: engine for engine in result.engines if engine.name in engines.names}
    logs = {name: process.log for name, process in engines.processes.items()}
    names, files = ", ".join(results), ", ".join(map(str, logs.values()))
    engines.progress(f"asking {names}" if result.servers else f"starting {names}; their output is in {files}")
    try:
        engines.start()
        for name in list(engines.names):
            with engines.errors(name):
                _read(engines, results[name], result.listed_tokens, readings)
        for cell in cells.all:
            _time(engines, results, cell, _rounds(cells))
        if result.task:
            _evaluate(engines, results, result.task)
    finally:
        engines.kill()
        for name, found in engines.found.items():
            results[name].ready_s, results[name].error = found.get("ready_s"), found.get("error")
            log, failed = logs[name], name not in engines.names  # an interrupt alone is no reason to keep the output
            if failed and log and log.exists() and log.stat().st_size:
                results[name].log = str(log)


def _read(engines: Engines, engine: EngineResult, listed: int, readings: dict[str, Reading]) -> None:
    begin = time.monotonic()
    reading: Reading = engines.call(engine.name, "read", listed)
    for name, other in readings.items():
        if not np.array_equal(reading.windows, other.windows):
            raise EngineError(
                f"its tokenizer reads the text as other tokens than that of {name}. Compare two of the same model."
            )
    readings[engine.name] = reading
    engine.reading_s = round(time.monotonic() - begin, 1)
    engines.progress(f"{engine.name} has read {reading.windows.size:,} tokens in {engine.reading_s:.1f} s")


def _rounds(cells: Cells) -> Iterator[int]:
    """Yields the numbers of the rounds of one cell, which begins now."""
    begin = time.monotonic()
    for number in range(cells.most_rounds):
        if number >= cells.rounds and time.monotonic() - begin > ENOUGH_S:
            return
        yield number


def _time(engines: Engines, results: dict[str, EngineResult], cell: Cell, rounds: Iterator[int]) -> None:
    taken: dict[str, list[float]] = {}
    for name, ms in engines.in_turns(rounds, "measure", cell):
        taken.setdefault(name, []).append(ms)
        if cell.tokens:
            results[name].first_token_ms = timing(taken[name])
        else:
            results[name].tokens_per_s[cell.sequences] = timing(taken[name], cell.sequences)
    medians = ", ".join(f"{name} {np.median(ms):.2f} ms" for name, ms in taken.items())
    if medians:
        engines.progress(f"{cell.name}: {medians}")


def _evaluate(engines: Engines, results: dict[str, EngineResult], task: str) -> None:
    found: dict[str, Scores] = {}
    for name in list(engines.names):
        with engines.errors(name):
            found[name] = engines.call(name, "evaluate", task)
            results[name].task_scores = {metric: float(each.mean()) for metric, each in found[name].items()}
            engines.progress(f"{name} has done {task}")
    base = found.get(BASELINE, {})
    for name, scores in found.items():
        if name != BASELINE:
            changes = {metric: each - base[metric] for metric, each in scores.items() if metric in base}
            results[name].task_changes = {metric: bootstrap(change) for metric, change in changes.items()}
