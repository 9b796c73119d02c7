"""`python -m warmup`, and the console script."""

import os
import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    os.umask(os.umask(0o077) & 0o077)  # whatever it is, what this process makes is its owner's to read and write
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt during the import needs no traceback
    from warmup.cli import run

    signal.signal(signal.SIGINT, handler)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
