"""How the process of the command ends."""

from __future__ import annotations

import subprocess
import sys
import time

PROGRAM = """
import atexit, sys, threading, time
from neoproto.run.__main__ import leave

atexit.register(print, "tidied up")
stuck = threading.Event()
threading.Thread(target=stuck.wait, daemon={daemon}).start()
print("closed", file=sys.stderr)


class Kept:
    def __del__(self):
        print("collected")


kept = Kept()
leave(130)
"""


def test_neither_a_stuck_thread_nor_what_is_in_memory_keeps_the_process() -> None:
    for daemon in (True, False):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(daemon=daemon)], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "tidied up\n", "closed\n")
        assert time.monotonic() - started < 50
