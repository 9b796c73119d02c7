"""Reports a failed command on standard error and in the report, instead of with a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fp8moe_plugin.errors import Fp8MoeError
from fp8moe_plugin.quoting import shown
from warmup import interrupts
from warmup.report import Report

RESUMED = ("compile", "bundle", "convert")
DISK_ADVICE = "Check the disk."
ACCESS_ADVICE = "Check the permissions of the file and its folder."
FILES_ADVICE = "Raise the limit of open files (ulimit -n)."
PROCESS_ADVICE = "Raise the limits of memory and processes (ulimit -v, ulimit -u), or stop other programs."
OTHER_ADVICE = "Check the file system, and the limits of this process (ulimit -a)."
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS), DISK_ADVICE),
    **dict.fromkeys((errno.EACCES, errno.EPERM), ACCESS_ADVICE),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), FILES_ADVICE),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), PROCESS_ADVICE),
}


@contextlib.contextmanager
def failure_reported(report: Report) -> Iterator[None]:
    """Print an error or interrupt in the block instead of passing it on, and put the first one into the report."""
    try:
        with interrupts.raised(*interrupts.ENDING):
            yield
        return
    except Fp8MoeError as error:
        message = str(error)
    except KeyboardInterrupt:
        message = " ".join((interrupts.MESSAGE, *_what_is_kept(report)))
    except OSError as error:
        place = f": {as_text(error.filename)}" if error.filename else ""
        message = f"{error.strerror or error}{place}. {ADVICE.get(error.errno or 0, OTHER_ADVICE)}"
    except (ImportError, MemoryError) as error:  # a memory limit may cause either of them
        message = f"{type(error).__name__}: {error}. Raise the memory limit (ulimit -v), or reinstall the package."
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            message = f"{report.command} needs PyTorch, which is not installed. Run it where the engine is installed."
    report.error = report.error or message
    print_error(message)


def _what_is_kept(report: Report) -> Iterator[str]:
    """Yields messages about the remains of an interrupted command."""
    if report.command in RESUMED:
        yield "Finished work is kept; run the command again to continue."
    elif report.compare:
        yield "The table has what was measured until then; run again, it measures everything anew."


def print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def as_text(name: str | bytes | Path) -> str:
    """Returns a file name unchanged if it is printable, otherwise quoted to neutralize terminal control sequences."""
    text = os.fsdecode(name)
    return text if text.isprintable() else shown(text)
