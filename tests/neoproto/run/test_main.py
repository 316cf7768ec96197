"""How the process of the command ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import atexit, sys, threading, time
from neoproto.run.process import leave

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


STUCK = """
import atexit, threading
import neoproto.run.process as command

command.LAST_WORDS_S = 0.5
atexit.register(threading.Event().wait)
command.leave(3)
"""


def test_what_hangs_at_the_end_of_the_process_is_left() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


CLOSED = """
import os, sys
from neoproto.run.process import open_standard_streams

open_standard_streams()
from neoproto.run.console import RunConsole

RunConsole().say("into nothing")
with open("file", "w") as file:
    print(file.fileno(), os.readlink("/proc/self/fd/1"), file=sys.stderr)
sys.stdout.write("nor is this seen")
"""


def test_a_closed_stdout_is_dev_null_and_no_other_file(tmp_path: Path) -> None:
    command = f"exec \"{sys.executable}\" -c '{CLOSED}' >&-"
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "3 /dev/null\n")
