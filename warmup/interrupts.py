"""What an interrupt (Ctrl-C) does, so that it ends a command with one line and never with a traceback.

Where a process ignores a signal from its start, as under `nohup`, it keeps ignoring it.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

MESSAGE = "Interrupted. What is done is kept; run the command again to go on."


def exit_at_once() -> None:
    """From now on an interrupt ends the process at once: there is nothing to clean up yet.

    The handler does not raise, because code that is being imported could swallow an exception.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def ignore() -> None:
    """From now on interrupts do nothing: only the end of the process follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def raised(*numbers: signal.Signals) -> Iterator[None]:
    """The first of these signals raises `KeyboardInterrupt`; later ones do not disturb the cleanup that follows."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]

    def raise_once(number: int, frame: FrameType | None) -> None:
        for heard in heeded:
            signal.signal(heard, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        for number in heeded:
            signal.signal(number, raise_once)
        yield
    finally:
        for number in heeded:
            signal.signal(number, handlers[number])


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """These signals wait until the end of the block. Processes that start in it never see an interrupt."""
    handlers = {number: signal.getsignal(number) for number in numbers}
    arrived: list[int] = []
    # A mask is inherited, but does not keep other threads of this process from taking a signal.
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
    with contextlib.suppress(OSError):  # nobody can be told
        os.write(2, f"error: {MESSAGE}\n".encode())
    os._exit(1)
