"""`python -m neoproto.run`."""

import atexit
import os
import sys
import threading

from neoproto.run.cli import main


def leave(code: int) -> None:
    """End the process now.

    A group that was starting when its run was ended can hold a thread inside Monarch for a minute, waiting
    for processes that are gone; the interpreter would wait for that thread.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.daemon for thread in others):
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
