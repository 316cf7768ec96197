"""`scripts/_signals.py`: tests need signals that work, however they were started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "_signals.py"
SHOWS = """
import os, signal
ignored = [signal.getsignal(one) is signal.SIG_IGN for one in (signal.SIGINT, signal.SIGHUP)]
print(ignored, os.getsid(0) == os.getpid())
raise SystemExit(7)
"""
WAITS = "import signal, time; print('waits', flush=True); time.sleep(60)"


def ignore() -> None:
    """What `nohup`, and a script's `&`, do."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *command], stdout=subprocess.PIPE, text=True, preexec_fn=ignore
    )


def test_ignored_signals_work_again_in_a_session_of_its_own() -> None:
    with start(sys.executable, "-c", SHOWS) as process:
        out, _ = process.communicate(timeout=30)
    assert out.strip() == "[False, False] True"
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("sent", "code"), [([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGHUP, signal.SIGTERM], 143)]
)
def test_sigterm_alone_is_passed_on(sent: list[signal.Signals], code: int) -> None:
    with start(sys.executable, "-c", WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        for signum in sent:
            process.send_signal(signum)
        assert process.wait(30) == code
