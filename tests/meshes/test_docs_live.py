"""docs/runtime.md, and examples of docs/extending.md and docs/data.md, run as scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meshes.leftovers import wait_until_clean

pytestmark = pytest.mark.live

PAGE = Path(__file__).parents[2] / "docs" / "runtime.md"


def run_program(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it in a folder, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        check=False,
    )


@pytest.mark.core
def test_the_page_about_the_runtime_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    program = "\n".join(blocks)
    script = tmp_path / "page.py"
    guard = "print(runtime.run_id, flush=True)\n"
    script.write_text(
        program.replace("group.close()", f"{guard}assert asyncio.run(main()) == [13, 13]\ngroup.close()", 1)
    )
    ended = run_program(script, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert wait_until_clean(ended.stdout.split()[-1], None, 2.0) == []


def test_the_worker_of_the_page_about_extending_runs(tmp_path: Path) -> None:
    script = PAGE.parent / "examples" / "reward_model.py"
    ended = run_program(script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(
        r"loss 0\.\d+ on 2 ranks\n(1\.00|0\.9\d) of 101 held-out pairs in the right order\n", ended.stdout
    )
    (run,) = (tmp_path / "outputs" / "runtime").iterdir()
    assert wait_until_clean(run.name.rpartition("-")[2], None, 2.0) == []


def test_a_stock_torchstore_client_shares_the_store(tmp_path: Path) -> None:
    ended = run_program(PAGE.parent / "examples" / "stock_client.py", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "the actor stored ['lengths.first']: [3, 1]"
    (run,) = (tmp_path / "outputs" / "runtime").iterdir()
    assert wait_until_clean(run.name.rpartition("-")[2], None, 2.0) == []
