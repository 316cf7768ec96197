"""The real engine, each case in a process of its own (see `engine_cases`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.engine_cases import CASES, environment

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[3]


CORE = ("changing", "sampling")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.core] * (one in CORE)) for one in CASES]
)
def test_vllm(case: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.actors.engine_cases", case, str(tmp_path)],
        cwd=ROOT,
        env=environment(str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
