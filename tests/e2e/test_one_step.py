"""docs/one-step.md lists every function of ours that a step, a put and a weight version run through."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "one-step.md"
WALKS = ROOT / "tests" / "e2e" / "walks"
LEFT_OUT = (
    "neoproto/trainer/metrics/",
    "neoproto/run/console.py",
    "neoproto/errors.py",
    "neoproto/tables.py",
    "neoproto/text.py",
    "neoproto/trace.py",
)
"""Metrics and messages."""
SPECIAL = re.compile(r"__\w+__$|<\w+>")
OPTIONS = ("trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.save_freq=-1")


def listed() -> dict[str, set[str]]:
    """File -> the functions that the page names of it."""
    found: dict[str, set[str]] = {}
    for bullet in re.split(r"^- ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        text = bullet.partition("\n#")[0]
        (path,) = re.findall(r"\]\(\.\./([\w/.]+)\)", text)
        assert path not in found, f"{path} is there twice"
        found[path] = set(re.findall(r"`([\w.]+)`", text))
    return found


def functions_of(path: Path) -> set[str]:
    """Qualified names of the functions that a file defines."""
    found: set[str] = set()

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef():
                    look(node.body, f"{prefix}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(prefix + node.name)
                case ast.If():
                    look(node.body + node.orelse, prefix)

    look(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_what_the_page_names_is_there() -> None:
    for path, names in listed().items():
        assert names, path
        assert names <= functions_of(ROOT / path), path


@pytest.mark.e2e
def test_every_function_of_a_step_is_on_the_page(
    tmp_path: Path, built_in_model: Path, cache: Path, user_env: dict[str, str]
) -> None:
    (tmp_path / "window").write_bytes(b"\0")
    env = user_env | {
        "NEOPROTO_WALKS": str(tmp_path),
        "NEOPROTO_CACHE": str(cache),
        "PYTHONPATH": f"{WALKS}:{ROOT}",
    }
    command = [
        sys.executable,
        str(WALKS / "loop.py"),
        "--config-name",
        "ppo_monarch",
        "+smoke=tiny",
        *OPTIONS,
    ]
    done = subprocess.run(
        [*command, f"runtime.run_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran: dict[str, set[str]] = {}
    for process in tmp_path.glob("*.json"):
        for _, path, name, _ in json.loads(process.read_text()):
            name = name.partition(".<locals>")[0]
            if not path.startswith(LEFT_OUT) and not SPECIAL.search(name):
                ran.setdefault(path, set()).add(name)
    known = listed()
    missing = {path: sorted(rest) for path, names in ran.items() if (rest := names - known.get(path, set()))}
    assert missing == {}
    for one in ("ppo_step", "SyncSteps.take"):
        assert any(one in names for names in ran.values()), "the step was not watched"
