"""Runs a command in a session of its own in which no signal is ignored, for `scripts/test`.

    python scripts/_signals.py COMMAND [argument …]

A script's `scripts/test &` starts with SIGINT ignored, `nohup scripts/test` with SIGHUP. Every process below
inherits that, and tests of Ctrl-C and of a terminal that closes would wait for nothing. What the caller
wanted still holds: neither a terminal's Ctrl-C nor its end reaches another session. SIGTERM is passed on, and
SIGINT or SIGHUP where the caller does not ignore it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

IGNORABLE = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(command: list[str]) -> int:
    """Run it; its exit code, 128 + n if signal n ended it."""
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=restore)

    def pass_on(signum: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(process.pid, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, pass_on)
    code = process.wait()
    return code if code >= 0 else 128 - code


def restore() -> None:
    """Give the signals their default actions."""
    for signum in IGNORABLE:
        signal.signal(signum, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
