"""The direction of dependencies is the one that DESIGN.md states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import imports_of, layer_of, sources, violations

ROOT = Path(__file__).resolve().parents[2]


def test_no_import_goes_against_the_table() -> None:
    assert list(sources(ROOT))
    assert violations(ROOT) == []


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("neoproto/config/a.py", "import torch", "imports torch, which it must do without"),
        ("neoproto/config/a.py", "def f():\n    from transformers import AutoModel", "imports transformers"),
        ("neoproto/trainer/a.py", "from neoproto.runtime import Runtime", "imports neoproto.runtime"),
        ("neoproto/trainer/a.py", "from neoproto import runtime", "imports neoproto.runtime"),
        ("neoproto/trainer/a.py", "from ..runtime.calls import RemoteCall", "imports neoproto.runtime"),
        ("neoproto/trainer/__init__.py", "from .. import runtime", "imports neoproto.runtime"),
        ("neoproto/trainer/a.py", "import importlib\nimportlib.import_module('vllm')", "imports vllm"),
        ("neoproto/runtime/a.py", "from monarch.actor import Actor", "imports monarch"),
        (
            "neoproto/runtime/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import meshes.monarch.jobs",
            "imports meshes",
        ),
        ("neoproto/weights/a.py", "import torchstore as ts", "imports torchstore"),
        ("neoproto/algorithms/a.py", "from neoproto.data import DataProto", "imports neoproto.data"),
        ("neoproto/errors.py", "import neoproto.config", "imports neoproto.config"),
        ("meshes/a.py", "from vllm import LLM", "imports vllm"),
        ("meshes/a.py", "import actors.training.policy", "imports actors"),
        ("meshes/a.py", "from neoproto.run import main", "nothing imports an entry point"),
        ("actors/a.py", "from neoproto.config.data import DataConfig", "takes DataConfig of neoproto.config"),
        ("actors/a.py", "from neoproto.runtime import Runtime", "takes Runtime of neoproto.runtime"),
        ("actors/a.py", "import neoproto.runtime", "takes the whole of neoproto.runtime"),
        ("configs/a.py", "import neoproto.errors", "imports neoproto.errors"),
        ("scripts/a.py", "import torchstore", "imports torchstore"),
        ("neoproto/misc/a.py", "import os", "is not in the table"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    write(tmp_path, name, text)
    (found,) = violations(tmp_path)
    assert found.startswith(name)
    assert complaint in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "neoproto/run/a.py",
            "import meshes.monarch.jobs, actors\nfrom neoproto.stack import check_stack",
        ),
        (
            "actors/a.py",
            "import vllm, monarch, torch\nfrom neoproto.runtime import Dispatch, Worker, register",
        ),
        (
            "neoproto/store/torchstore/engine.py",
            "import torchstore, monarch.actor\nfrom neoproto.errors import StoreError",
        ),
        (
            "neoproto/trainer/a.py",
            "from neoproto.trainer.b import c\nfrom . import d\nfrom ..data import DataProto",
        ),
        ("scripts/bench.py", "import neoproto.run, meshes"),
    ],
)
def test_a_right_import_is_let_through(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert violations(tmp_path) == []


def test_reader_resolves_relative_imports_and_lines(tmp_path: Path) -> None:
    write(tmp_path, "neoproto/a/b/__init__.py", "\nfrom ..c import d\nfrom . import e\n")
    (path,) = sources(tmp_path)
    assert [(i.line, i.module, i.name) for i in imports_of(path, tmp_path)] == [
        (2, "neoproto.a.c", "d"),
        (3, "neoproto.a.b", "e"),
    ]
    assert layer_of("neoproto", "config") == "neoproto.config"
    assert layer_of("torch.nn") is None


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("neoproto.config", ("torch", "monarch", "vllm", "transformers", "numpy")),
        ("neoproto.stack", ("torch", "monarch", "vllm", "transformers")),
        ("neoproto.runtime", ("monarch", "vllm", "transformers")),
        ("neoproto.algorithms", ("monarch", "vllm", "transformers")),
    ],
)
def test_importing_it_brings_nothing_heavy(module: str, without: tuple[str, ...]) -> None:
    """What the reader of imports cannot see: packages brought along by others."""
    code = f"import sys, {module}; print(*(name for name in {without} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
