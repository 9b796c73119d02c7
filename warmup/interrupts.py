"""Handling of interrupts (Ctrl-C), so that they end a command with one line instead of a traceback.

A signal that was ignored when the process started, as under `nohup`, stays ignored.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals with which a user or the system ends a command
RETRY_S = 0.001
MESSAGE = "Interrupted."


def exit_at_once() -> None:
    """Make interrupts end the process immediately from now on; used while there is nothing to clean up.

    The handler does not raise, because imported modules might swallow the exception.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def ignore() -> None:
    """Ignore interrupts from now on; used just before the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def raised(*numbers: signal.Signals) -> Iterator[None]:
    """Turn the first of these signals into a `KeyboardInterrupt`, and ignore later ones to protect the cleanup.

    Python drops exceptions in a destructor or in the callback of a weak reference. In these cases the signal is raised
    again a little later.
    """
    handlers = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    hook, first = sys.unraisablehook, signal.SIGINT

    def handle(handler: Any) -> None:
        for number in caught:
            signal.signal(number, handler)

    def raise_once(number: int, frame: FrameType | None) -> None:
        nonlocal first
        handle(signal.SIG_IGN)
        first = signal.Signals(number)
        raise KeyboardInterrupt

    def retry(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)
            return
        handle(raise_once)
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)

    alarm = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(first))
    try:
        sys.unraisablehook = retry
        handle(raise_once)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        sys.unraisablehook = hook
        for number in caught:
            signal.signal(number, handlers[number])


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Delay these signals until the end of the block. Processes started in the block ignore interrupts forever."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    arrived: list[int] = []
    # Child processes inherit the mask, but other threads of this process can still receive the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for first in arrived[:1]:
        signal.raise_signal(first)


def _exit(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, f"error: {MESSAGE}\n".encode())
    os._exit(1)
