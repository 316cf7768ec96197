from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

CASES = """
import os, subprocess, sys, time
import pytest

pytestmark = pytest.mark.live

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("not here")
def test_exits(): os._exit(7)
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    open(os.environ["CHILD_FILE"], "w").write(str(child.pid))
    time.sleep(300)
"""


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.run_isolated_tests", "--out", str(folder / "out"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CHILD_FILE": str(folder / "child")},
    )


def test_every_end_of_a_case_is_reported_and_the_rest_go_on(tmp_path: Path) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(CASES)
    done = run([str(file), "-j", "3", "--timeout", "30"], tmp_path)
    lines = done.stdout.splitlines()
    assert lines[-1] == "1 passed, 3 failed (1 hung), 1 skipped", done.stdout + done.stderr
    assert done.returncode == 1
    summary = {
        one["case"].split("::")[1]: one for one in json.loads((tmp_path / "out/summary.json").read_text())
    }
    assert {name: one["status"] for name, one in summary.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_exits": "failed",
        "test_hangs": "hung",
    }
    assert summary["test_exits"]["exit_code"] == 7
    assert len(json.loads((tmp_path / "out/manifest.json").read_text())) == 5
    assert "assert 1 == 2" in Path(summary["test_fails"]["log"]).read_text()
    assert len(list((tmp_path / "out").glob("*.exit"))) == 5
    assert len(list((tmp_path / "out").glob("*.xml"))) == 3, "a case that dies leaves no report"
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists(), "the hung case's children go with it"
    again = run([str(file), "--lf", "-k", "fails or passes"], tmp_path)
    assert again.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_collection_that_fails_fails(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import does_not_exist\n")
    done = run([str(tmp_path / "test_broken.py")], tmp_path)
    assert done.returncode == 1
    assert "collection failed" in done.stderr
