"""How a command's process begins and ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from neoproto.run.trainers import Loop

LAST_WORDS_S = 20.0
"""What packages want to do at the end of a process (upload what is left, say) may take so long."""


def run_command(own_loop: Loop | None = None) -> NoReturn:
    """`python -m neoproto.run` with this process's arguments, and then the end of the process.

    Args:
        own_loop: a trainer loop of the caller's, in place of the one that `trainer.mode` names.
    """
    open_standard_streams()
    if len(sys.argv) == 3 and sys.argv[1] == "--shell-completion":
        from neoproto.run.completion import main as complete  # asked at every key: nothing else is imported

        leave(complete(sys.argv[2]))
    from neoproto.run.cli import main  # late: what it imports may open files

    leave(main(sys.argv[1:], own_loop))


def open_standard_streams() -> None:
    """Send streams that were closed (`>&-`) to /dev/null, before some other file gets one of their numbers.

    What native code and workers write to 1 or 2 would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(number, True)
    # For the life of the process, so nobody closes them.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def collect_garbage_rarely() -> None:
    """Have Python look for reference cycles every 50,000 new objects instead of every 700.

    The controller of a large run holds some hundred thousand prompts and samples, and makes as many objects a
    step. Looking through them took half of its time; the few cycles that it makes can wait.
    """
    gc.set_threshold(50_000, 20, 20)


def leave(code: int) -> NoReturn:
    """End the process now.

    The interpreter would first wait for its threads: a group that was starting when its run was ended can
    hold one inside Monarch for a minute, waiting for processes that are gone. Then it would collect all its
    memory, torch included, which takes seconds on a busy machine.
    """
    deadline = threading.Timer(LAST_WORDS_S, os._exit, (code,))
    deadline.daemon = True
    deadline.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never open
            stream.flush()
    os._exit(code)
