"""How a command's process begins and ends."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import gc
import io
import os
import stat
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from neoproto.runtime.signals import end_at_once, end_with

if TYPE_CHECKING:
    from neoproto.run.trainers import Loop

LAST_WORDS_S = 20.0
"""What packages want to do at the end of a process (upload what is left, say) may take so long."""


def run_command(own_loop: Loop | None = None) -> NoReturn:
    """`python -m neoproto.run` with this process's arguments, and then the end of the process.

    Args:
        own_loop: a trainer loop of the caller's, in place of the one that `trainer.mode` names.
    """
    begin()
    if len(sys.argv) == 3 and sys.argv[1] == "--shell-completion":
        from neoproto.run.completion import main as complete  # asked at every key: nothing else is imported

        leave(complete(sys.argv[2]))
    from neoproto.run.cli import main  # late: what it imports may open files

    collect_garbage_rarely()
    leave(main(sys.argv[1:], own_loop))


def begin() -> None:
    """What every command does before it imports anything heavy."""
    end_at_once()
    open_standard_streams()
    codecs.register_error(PLAIN, plain)
    sys.stdout, sys.stderr = readable(sys.stdout), readable(sys.stderr)
    try:
        os.getcwd()
    except OSError as error:
        reason = error.strerror or error
        sys.stderr.write(f"error: the current folder cannot be used: {reason}; cd to another one\n")
        leave(2)


PLAIN = "neoproto.plain"
_PLAIN = {"…": "...", "–": "-", "—": "-", "→": "->", "×": "x", "≤": "<=", "≥": ">=", "·": ".", "±": "+-"}


def plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """How characters are printed that the console's encoding lacks; bytes of file names as they are."""
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1


class TerminalFile(io.FileIO):
    """Drops output to a closed terminal: SIGHUP may end the run, a failed write may not."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def readable(stream: Any) -> Any:
    """The stream in a form that any text can be written to, whatever its encoding."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if not stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):  # isatty() is false for a terminal that is gone
        stream.reconfigure(errors=PLAIN)
        return stream
    raw: Any = TerminalFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=PLAIN, line_buffering=True
    )


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
    # Open as long as the process runs, so never closed.
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
    end_with(code)
    deadline = threading.Timer(LAST_WORDS_S, os._exit, (code,))
    deadline.daemon = True
    deadline.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never open
            stream.flush()
    os._exit(code)
