"""How the process of the command ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


SIGNALLED = """
import os, signal, sys
from neoproto.run import process
from neoproto.runtime.signals import Terminated, raised_signals

process.begin()
number = signal.Signals[sys.argv[1]]
if sys.argv[2] == "raised":
    try:
        with raised_signals():
            signal.raise_signal(number)
    except (KeyboardInterrupt, Terminated) as error:
        print(type(error).__name__, flush=True)
elif sys.argv[2] == "left":
    import atexit
    atexit.register(signal.raise_signal, number)
    process.leave(3)
signal.raise_signal(number)
print("ignored")
"""


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("SIGINT", 130, "interrupted"),
        ("SIGTERM", 143, "ended by SIGTERM"),
        ("SIGHUP", 129, "ended by SIGHUP"),
    ],
)
def test_a_signal_ends_a_command_with_its_code_whenever_it_comes(
    name: str, code: int, line: str, tmp_path: Path
) -> None:
    def ended(when: str) -> tuple[int, str, str]:
        words = [sys.executable, "-c", SIGNALLED, name, when]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    kind = "KeyboardInterrupt" if name == "SIGINT" else "Terminated"
    assert ended("at once") == (code, "", f"{line}; nothing was started\n")
    assert ended("raised") == (code, f"{kind}\n", "")  # whoever leaves the block has said what ended it
    assert ended("left") == (3, "", "")


def test_a_signal_that_is_ignored_on_entry_stays_so() -> None:
    words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", SIGNALLED, "SIGINT", "at once"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ignored\n", "")


def test_a_folder_that_was_deleted_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, "-m", "neoproto.report", "run"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, cwd=gone, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: the current folder cannot be used: No such file or directory; cd to another one\n",
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_console_takes_any_text(encoding: str) -> None:
    text = "a … – b × ☃ \udcff"
    program = f"from neoproto.run import process; process.begin(); print({text!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    times = b"x" if encoding == "ascii" else "×".encode("latin-1")
    assert done.stdout == b"a ... - b " + times + b" ? \xff\n"


def test_a_terminal_that_was_closed_does_not_end_a_command() -> None:
    ours, theirs = os.openpty()
    program = (
        "import sys\nfrom neoproto.run import process\nprocess.begin()\n"
        "sys.stdin.readline()\nprint('lost', flush=True)\nprint('lost', file=sys.stderr)\nprocess.leave(7)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.close(ours)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 7
