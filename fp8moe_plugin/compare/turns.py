"""Engines in their own processes that take turns. If an engine fails, the others continue without it."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fp8moe_plugin.compare.process import EngineError, EngineProcess

PATIENCE_S = 30.0


class Engines:
    """Processes by the names of their engines; `found` has the seconds of their start or their `error`."""

    def __init__(self, processes: dict[str, EngineProcess], timeout: float, progress: Callable[[str], None]) -> None:
        """
        Args:
            timeout: seconds of the start, and of each call.
        """
        self.names = list(processes)  # those that have not failed
        self.processes, self.timeout, self.progress = processes, timeout, progress
        self.found: dict[str, dict[str, Any]] = {name: {} for name in processes}

    def start(self) -> None:
        """Start all engines, and wait until they are ready."""
        begin = time.monotonic()
        for name in self.names:
            self.processes[name].start()
        self.wait_until_made(begin)

    def wait_until_made(self, begin: float) -> None:
        """Wait until all engines are ready. They started at `begin` of the monotonic clock.

        If this is interrupted, engines that are not ready get an error that says so.
        """
        try:
            for name in list(self.names):
                self._wait_and_report(name, begin)
                self._made(name, begin)
        except KeyboardInterrupt:
            for name in [name for name in self.names if "ready_s" not in self.found[name]]:
                if self.processes[name].has_answered(0):
                    self._made(name, begin)
                else:
                    seconds = time.monotonic() - begin
                    self.found[name]["error"] = f"interrupted after {seconds:.0f} s, before it was ready"
            raise

    def _wait_and_report(self, name: str, begin: float) -> None:
        """Wait for an engine, and report every half minute which engines are not ready."""
        while not self.processes[name].has_answered(PATIENCE_S) and time.monotonic() - begin < self.timeout:
            missing = [other for other in self.names if not self.processes[other].has_answered(0)]
            missing = [other for other in missing if "ready_s" not in self.found[other]]
            self.progress(f"not ready after {time.monotonic() - begin:.0f} s: {', '.join(missing)}")

    def _made(self, name: str, begin: float) -> None:
        with self.errors(name):
            made = self.processes[name].wait_until_made(max(1.0, begin + self.timeout - time.monotonic()))
            self.found[name]["ready_s"] = round(made - begin, 1)
            self.progress(f"{name} was ready after {made - begin:.0f} s")

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Returns the result of a method of one engine. Raises `EngineError`; see `errors`."""
        return self.processes[name].call(method, *arguments, timeout=self.timeout)

    def in_turns(self, rounds: Iterable[int], method: str, *arguments: Any) -> Iterator[tuple[str, Any]]:
        """Call each engine once in each round, one after another. Yields names and answers.

        Args:
            rounds: their numbers, on which the order depends.
        """
        for number in rounds:
            for name in turns(self.names, number):
                with self.errors(name):
                    yield name, self.call(name, method, *arguments)

    @contextlib.contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Drop an engine that fails; the others continue."""
        try:
            yield
        except EngineError as error:
            self.found[name]["error"] = str(error)
            self.names.remove(name)
            self.processes[name].kill()
            self.progress(f"{name} failed: {error}")

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def turns(names: list[str], number: int) -> list[str]:
    """Returns the order of the engines in a round: each comes first in turn, and every other round is reversed."""
    first = number // 2 % max(len(names), 1)
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order
