"""`python -m neoproto MODULE`: how the commands that a person types so begin and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import signal, sys
import neoproto.__main__ as command

def run_module(name, run_name):
    print(name, flush=True)
    {work}

command.runpy.run_module = run_module
sys.argv = ["neoproto", "actors.tiny_model"]
command.main()
"""


def typed(work: str, folder: Path) -> tuple[int, str]:
    """The exit code and the error stream of the command, its module doing `work`."""
    program = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        ("signal.raise_signal(signal.SIGINT)", 130, "interrupted\n"),
        ("signal.raise_signal(signal.SIGTERM)", 143, "ended by SIGTERM\n"),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('no such model')", 1, "no such model\n"),
        ("sys.exit()", 0, ""),
    ],
)
def test_it_ends_with_one_line_and_its_code(work: str, code: int, said: str, tmp_path: Path) -> None:
    assert typed(work, tmp_path) == (code, said)


@pytest.mark.parametrize("name", ["actors.nonsense", "neoproto.rum", "actors", "meshes.no.such"])
def test_what_is_no_module_to_run_is_named(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "neoproto", name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "the commands are\n" in done.stderr
    assert "Traceback" not in done.stderr
