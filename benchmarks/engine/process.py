"""Engines in processes of their own that do one call after another, so that several can take turns on one GPU."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

LONGEST_ERROR = 300  # characters; the whole of it is on stderr
LONGEST_END_S = 10


class EngineProcess:
    """Makes an engine in a process of its own, and calls its methods there. What it prints goes to stderr.

    `make` and all arguments and answers are pickled; `environment` is added to that of the process before `make`.
    The process ends, with all that it started, at the first failure and when this process ends.
    """

    def __init__(self, make: Callable[[], Any], environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
        self._connection, self._other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._other, make, environment))
        self._ended: int | None = None
        self._killed = False

    def start(self) -> None:
        """Begin to make the engine."""
        atexit.register(self.kill)  # or multiprocessing would wait there for the process to end by itself
        self._process.start()
        assert self._process.pid is not None
        self._ended = os.pidfd_open(self._process.pid)  # a process that the engine forked keeps the sentinel open
        self._other.close()

    def wait_until_made(self, timeout: float) -> None:
        """
        Raises:
            EngineError: `make` failed, its process ended, or it took longer than `timeout` seconds.
        """
        self._answer(timeout)

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """The method's result.

        Raises:
            EngineError: it failed, its process ended, or it took longer than `timeout` seconds.
        """
        with contextlib.suppress(ConnectionError):  # the process has ended, which _answer says
            self._connection.send((method, arguments))
        return self._answer(timeout)

    def kill(self) -> None:
        """End the process, if it was started, and all that it started."""
        if self._process.pid is None or self._killed:
            return
        with contextlib.suppress(ProcessLookupError):  # the group has ended by itself, or has not begun
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        if self._ended is not None:
            os.close(self._ended)
        self._killed = True  # from now on another process may get its number

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
        except (EOFError, OSError):  # it ended, perhaps in the middle of an answer
            wait([self._ended], LONGEST_END_S)
            status = self._process.exitcode
            self.kill()
            raise EngineError(f"ended with status {status}") from None
        if not done:
            self.kill()
            raise EngineError(answer)
        return answer


class EngineError(Exception):
    """What an engine did not do, and why."""


def _serve(connection: Connection, make: Callable[[], Any], environment: dict[str, str]) -> None:
    """Make the engine, then do what comes, until the other side kills this process or ends."""
    os.setsid()  # a group of its own: see kill
    os.dup2(2, 1)
    end = threading.Thread(target=_end_with_parent, daemon=True)
    end.start()
    os.environ |= environment
    try:
        engine = make()
        answer = None
        while True:
            connection.send((True, answer))
            method, arguments = connection.recv()
            answer = getattr(engine, method)(*arguments)
    except BaseException as failure:  # noqa: BLE001 (an engine may fail in any way; the other side is told how)
        with contextlib.suppress(OSError):  # stderr may be gone
            traceback.print_exc()
        text = " ".join(f"{type(failure).__name__}: {failure}".split())
        with contextlib.suppress(ConnectionError):
            connection.send((False, text[:LONGEST_ERROR]))
    finally:
        end.join()  # not by itself, which would leave what the engine has started


def _end_with_parent() -> None:
    """A process that was killed can end nothing itself, and an engine holds its memory of the GPU. (A call that never
    lets another thread run delays this.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
