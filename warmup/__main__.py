"""`python -m warmup`, and the console script."""

import os
import sys

from warmup import interrupts, streams


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: None for the command line of this process, whose standard streams and interrupts are then taken
            over for good.
    """
    os.umask(os.umask(0o077) & 0o077)  # whatever it is, what this process makes is its owner's to read and write
    from_command_line = arguments is None
    if from_command_line:
        # Before torch is imported: OpenMP threads that spin while they wait slow `convert` down on a busy machine.
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
