"""Standard streams that never stop a command: output that fails is dropped, and the first failure is recorded."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from fp8moe_plugin.errors import UnsupportedError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Descriptor(io.FileIO):
    """A file descriptor that accepts all bytes, even if they cannot be written."""

    failure: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        try:
            written = super().write(data)
            if written is None:  # a non-blocking pipe that is full
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
        # Names may contain characters that the encoding does not have.
        super().__init__(buffer, encoding, errors="backslashreplace", line_buffering=True)


def take_over() -> None:
    """Replace the standard streams of this process.

    Closed streams are connected to the null device. This must happen before any file is opened, which would otherwise
    get the descriptor of a closed stream, and its output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor
    sys.stdout, sys.stderr = (
        Output(descriptor, stream.encoding if stream else "utf-8")
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr))
    )


def require_output() -> None:
    """Check that all output was written, or that its reader closed the pipe on purpose, as `head` does.

    Raises:
        UnsupportedError: some output was lost.
    """
    sys.stdout.flush()
    failure = sys.stdout.descriptor.failure if isinstance(sys.stdout, Output) else None
    if failure and failure.errno != errno.EPIPE:
        raise UnsupportedError(
            f"Standard output cannot be written: {failure.strerror}. Free some disk space, or redirect it elsewhere."
        )
