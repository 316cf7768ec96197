"""The repository's own text: nothing left to do in it, and nothing of one developer's machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Written in pieces, so that this file does not find itself.
LEFTOVER = re.compile(r"\b(T" + r"ODO|FIXM" + r"E|XX" + r"X)\b")
SOMEBODYS_PATH = re.compile(r"(?<![\w.$}])/(roo" + r"t|wor" + r"k|Users|home/(?!\{|\$|<)\w+)/")
VERBATIM = {"LICENSE"}


def complaints(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, what in ((LEFTOVER, "something left to do"), (SOMEBODYS_PATH, "a path of one machine")):
            if pattern.search(line):
                yield f"{name}:{number}: {what}: {line.strip()}"


def repository_files() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return [name for name in listed.split("\0") if name and name not in VERBATIM and (ROOT / name).is_file()]


def test_nothing_is_left_to_do_and_no_path_is_anybodys() -> None:
    names = repository_files()
    assert "pyproject.toml" in names
    found: list[str] = []
    for name in names:
        try:
            found += complaints(name, (ROOT / name).read_text())
        except UnicodeDecodeError:
            continue  # a binary file
    assert found == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# T" + "ODO: later", 1),
        ("x = 1  # FIXM" + "E", 1),
        ('path = "/roo' + 't/data"', 1),
        ("see /home/" + "ann/notes", 1),
        ("mktemp /tmp/run.XXXXXX", 0),
        ("cd $HOME/project/home/ann/", 0),
        ("https://example.org/work/item and docs/work/a.md", 0),
    ],
)
def test_the_patterns_find_what_they_should(text: str, count: int) -> None:
    assert len(list(complaints("a.md", text))) == count
