"""Configuration is read before anything heavy is needed."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "monarch", "torchstore", "vllm", "transformers", "hydra", "omegaconf", "numpy")


def test_importing_it_imports_nothing_heavy() -> None:
    program = f"import sys, neoproto.config; print(sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
