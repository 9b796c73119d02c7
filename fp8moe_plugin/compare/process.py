"""Engines in their own processes that answer one call after another, so that several can take turns on one GPU."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LONGEST_ERROR = 600  # characters; the log has the whole error
LONGEST_END_S = 10


class EngineProcess:
    """Makes an engine in its own process, and calls its methods there. Its output goes to `log`, or to stderr.

    `make`, arguments and answers are pickled; `environment` is added to the process's before `make`. The process and
    all its children end at the first failure, and when this process ends.
    """

    def __init__(self, make: Callable[[], Any], environment: dict[str, str], log: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self._connection, self._other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._other, make, environment, log))
        self.log = log
        self._ended: int | None = None
        self._killed = False

    def start(self) -> None:
        """Begin to make the engine."""
        atexit.register(self.kill)  # otherwise multiprocessing would wait at exit for the process to end by itself
        self._process.start()
        assert self._process.pid is not None
        self._ended = os.pidfd_open(
            self._process.pid
        )  # the sentinel stays open in processes that the engine has forked
        self._other.close()

    def has_answered(self, timeout: float) -> bool:
        """Returns whether there is an answer or the process has ended: `wait_until_made` or `call` would not wait."""
        return self._killed or self._ended is None or bool(wait([self._connection, self._ended], timeout))

    def wait_until_made(self, timeout: float) -> float:
        """Returns the time of the monotonic clock, which all processes share, at which the engine was made.

        Raises:
            EngineError: `make` failed, its process ended, or it took longer than `timeout` seconds.
        """
        made: float = self._answer(timeout)
        return made

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Returns the method's result.

        Raises:
            EngineError: it failed, its process ended, or it took longer than `timeout` seconds.
        """
        with contextlib.suppress(ConnectionError):  # the process has ended; _answer reports it
            self._connection.send((method, arguments))
        return self._answer(timeout)

    def kill(self) -> None:
        """End the process, if it was started, and all its children."""
        if self._process.pid is None or self._killed:
            return
        with contextlib.suppress(ProcessLookupError):  # the group has ended by itself, or does not exist yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        if self._ended is not None:
            os.close(self._ended)
        self._killed = True  # its process id may be reused from now on

    def _answer(self, timeout: float) -> Any:
        if self._killed or self._ended is None:
            raise EngineError(f"ended with status {self._process.exitcode}")
        if not wait([self._connection, self._ended], timeout):
            self.kill()
            raise EngineError(f"not done within {timeout:g} s")
        try:
            if not self._connection.poll():
                raise EOFError
            done, answer = self._connection.recv()
        except (EOFError, OSError):  # the process ended, perhaps in the middle of an answer
            wait([self._ended], LONGEST_END_S)
            status = self._process.exitcode
            self.kill()
            raise EngineError(f"ended with status {status}") from None
        if not done:
            self.kill()
            raise EngineError(answer)
        return answer


class EngineError(Exception):
    """An engine failed; the message says why. If the engine itself raises it, nothing is added to the message."""


def _serve(connection: Connection, make: Callable[[], Any], environment: dict[str, str], log: Path | None) -> None:
    """Make the engine, then answer calls until the other side ends or kills this process."""
    os.setsid()  # its own process group, for kill
    if log:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    end = threading.Thread(target=_end_with_parent, daemon=True)
    end.start()
    os.environ |= environment
    try:
        engine = make()
        answer = time.monotonic()
        while True:
            connection.send((True, answer))
            method, arguments = connection.recv()
            answer = getattr(engine, method)(*arguments)
    except BaseException as failure:  # noqa: BLE001 (an engine may fail in any way; the other side gets the error)
        if not isinstance(failure, EngineError):
            with contextlib.suppress(OSError):  # stderr may be gone
                traceback.print_exc()
        with contextlib.suppress(ConnectionError):
            connection.send((False, _one_line(failure)))
    finally:
        end.join()  # ending by itself would leave the children of the engine


def _one_line(failure: BaseException) -> str:
    """Returns an error as one line that is safe for a terminal: an engine's error may quote a checkpoint."""
    kind = "" if isinstance(failure, EngineError) else f"{type(failure).__name__}: "
    text = " ".join(f"{kind}{failure}".split())
    if len(text) > LONGEST_ERROR:
        text = f"{text[: LONGEST_ERROR - 3]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _end_with_parent() -> None:
    """End this process group when the parent ends: a killed parent cannot, and an engine would keep its GPU memory.
    (A call that never releases the GIL delays this.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
