"""Runs a module as the ranks of one group: python -m MODULE RANK WORLD_SIZE FOLDER for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(module: str, folder: Path, world_size: int) -> None:
    """All ranks, to their end; their output is shown if one fails."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(world_size), str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
