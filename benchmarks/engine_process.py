"""Engines in processes of their own that do one call after another, so that several can take turns on one GPU."""

import contextlib
import multiprocessing
import os
import signal
import textwrap
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class EngineProcess:
    """Makes an engine in a process of its own, and calls its methods there. What it prints goes to stderr.

    `make` and all arguments and answers are pickled; `environment` is added to that of the process before `make`.
    """

    def __init__(self, make: Callable[[], Any], environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, environment))
        self._process.start()
        other.close()

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
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which _answer says
            self._connection.send((method, arguments))
        return self._answer(timeout)

    def kill(self) -> None:
        """End the process and all that it started."""
        assert self._process.pid is not None  # it was started
        with contextlib.suppress(ProcessLookupError):  # the group has ended by itself, or has not begun
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _answer(self, timeout: float) -> Any:
        if not self._connection.poll(timeout):
            raise EngineError(f"not done within {timeout:g} s")
        try:
            done, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise EngineError(f"ended with status {self._process.exitcode}") from None
        if not done:
            raise EngineError(answer)
        return answer


class EngineError(Exception):
    """What an engine did not do, and why."""


def _serve(connection: Connection, make: Callable[[], Any], environment: dict[str, str]) -> None:
    """Make the engine, then do what comes, until the other end is closed."""
    os.setsid()  # a group of its own: see kill
    os.dup2(2, 1)
    os.environ |= environment
    try:
        engine = make()
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(engine, method)(*arguments)))
    except EOFError:
        return
    except Exception as failure:  # noqa: BLE001 (an engine may fail in any way; the other side is told how)
        traceback.print_exc()
        connection.send((False, textwrap.shorten(f"{type(failure).__name__}: {failure}", 300)))
