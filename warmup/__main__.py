"""The entry point of `python -m warmup` and of the console script."""

import os
import sys

from warmup import interrupts, streams


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status.

    Args:
        arguments: None for the command line of this process, whose standard streams and interrupt handlers are then
            replaced permanently.
    """
    os.umask(os.umask(0o077) & 0o077)  # files of this process are always readable and writable by their owner
    from_command_line = arguments is None
    if from_command_line:
        # Must precede the import of torch: spinning OpenMP threads slow `convert` down on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        interrupts.exit_at_once()
        streams.take_over()
    try:
        from warmup.cli import run

        return run(arguments)
    finally:
        if from_command_line:
            interrupts.ignore()


if __name__ == "__main__":
    sys.exit(main())
