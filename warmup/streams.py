"""Standard streams that never stop a command: what they cannot take is dropped, and the first failure is remembered."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from fp8moe_plugin.errors import UnsupportedError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Descriptor(io.FileIO):
    """A descriptor that takes all bytes, whether or not they can be written."""

    failure: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        try:
            written = super().write(data)
            if written is None:  # a non-blocking pipe that nobody empties
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            self.failure = self.failure or error
            return memoryview(data).nbytes
        return written


class Output(io.TextIOWrapper):
    """Standard output or standard error of this process."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        self.descriptor = _Descriptor(descriptor, "wb", closefd=False)
        buffer = io.BufferedWriter(self.descriptor)
        # A name may hold what the terminal cannot show.
        super().__init__(buffer, encoding, errors="backslashreplace", line_buffering=True)


def take_over() -> None:
    """Replace the standard streams of this process.

    Closed streams become the null device. This must happen before any file is opened: the file would get the number
    of a closed stream, and the text that is meant for the stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
    sys.stdout, sys.stderr = (
        Output(descriptor, stream.encoding if stream else "utf-8")
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr))
    )


def require_output() -> None:
    """Check that standard output took everything, or that its reader closed it on purpose, as `head` does.

    Raises:
        UnsupportedError: something was lost.
    """
    sys.stdout.flush()
    failure = sys.stdout.descriptor.failure if isinstance(sys.stdout, Output) else None
    if failure and failure.errno != errno.EPIPE:
        raise UnsupportedError(
            f"Standard output cannot be written: {failure.strerror}. Make room, or redirect it to another file."
        )
