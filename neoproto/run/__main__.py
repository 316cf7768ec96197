"""`python -m neoproto.run`."""

import atexit
import contextlib
import os
import sys

from neoproto.run.cli import main


def leave(code: int) -> None:
    """End the process now.

    The interpreter would first wait for its threads: a group that was starting when its run was ended can
    hold one inside Monarch for a minute, waiting for processes that are gone. Then it would collect all its
    memory, torch included, which takes seconds on a busy machine.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never open
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
