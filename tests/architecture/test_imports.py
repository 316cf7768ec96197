"""Imports go the way that CONTRIBUTING.md states, in no circle; Monarch's private API stays in its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neoproto.private_api.monarch import PRIVATE
from tests.architecture.imports import (
    EVERYTHING,
    MAY_IMPORT,
    ONLY_IN,
    ROOT,
    circles,
    imports_of,
    layer_of,
    private_uses,
    sources,
    violations,
)

OVERRIDDEN = {"_create", "_kill", "_state", "_handle_undeliverable_message"}
PRIVATE_NAMES = {last for name in PRIVATE if (last := name.replace(":", ".").split(".")[-1]).startswith("_")}


def test_no_import_goes_against_the_table() -> None:
    assert list(sources(ROOT))
    assert violations(ROOT) == []


def test_no_files_import_each_other() -> None:
    assert circles(ROOT) == []


def test_monarchs_private_api_is_used_in_one_file() -> None:
    assert PRIVATE_NAMES > OVERRIDDEN
    assert private_uses(ROOT, PRIVATE_NAMES - OVERRIDDEN) == []


def test_the_tables_say_what_they_have_to() -> None:
    assert MAY_IMPORT["neoproto.errors"] == frozenset()
    assert MAY_IMPORT["scripts"] == MAY_IMPORT["neoproto.run"] == EVERYTHING
    assert {name for names in MAY_IMPORT.values() for name in names} - EVERYTHING <= MAY_IMPORT.keys()
    assert ONLY_IN["monarch"] == {
        "neoproto.private_api",
        "neoproto.store.torchstore",
        "meshes.monarch",
        "scripts",
    }
    for shared in ("meshes.common", "neoproto.store", "neoproto.runtime", "neoproto.weights"):
        assert MAY_IMPORT[shared].isdisjoint(
            {"neoproto.private_api", "meshes.monarch", "neoproto.store.torchstore"}
        )


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
        ("meshes/monarch/a.py", "from vllm import LLM", "imports vllm"),
        ("meshes/monarch/a.py", "import actors.training.policy", "imports actors"),
        ("meshes/monarch/a.py", "from neoproto.run import main", "nothing imports an entry point"),
        ("meshes/common/a.py", "from monarch.actor import Actor", "imports monarch"),
        ("meshes/common/a.py", "def f():\n    from meshes.monarch import sdk", "imports meshes.monarch"),
        ("meshes/common/a.py", "from meshes import monarch", "imports meshes.monarch"),
        ("neoproto/store/a.py", "import monarch", "imports monarch"),
        ("neoproto/store/a.py", "from neoproto.store.torchstore import engine", "imports neoproto.store.tor"),
        ("neoproto/weights/a.py", "import neoproto.store.torchstore.actors", "imports neoproto.store.tor"),
        ("neoproto/trainer/a.py", "from neoproto.private_api import monarch", "imports neoproto.private_api"),
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
            "import vllm, torch\nfrom neoproto.runtime import Dispatch, Worker, register",
        ),
        (
            "neoproto/store/torchstore/actors.py",
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import neoproto.b", ["neoproto.a <-> neoproto.b"]),
        ("def later():\n    from neoproto import b", ["neoproto.a <-> neoproto.b"]),
        ("from neoproto.c import x", ["neoproto.a <-> neoproto.b <-> neoproto.c"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import neoproto.b", []),
        ("import neoproto.d", []),
    ],
)
def test_a_circle_is_found(tmp_path: Path, text: str, found: list[str]) -> None:
    write(tmp_path, "neoproto/a.py", text)
    write(tmp_path, "neoproto/b.py", "from neoproto.a import f")
    write(tmp_path, "neoproto/c.py", "import neoproto.b")
    write(tmp_path, "neoproto/d.py", "import os")
    assert circles(tmp_path) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from monarch._src.actor import actor_mesh", ["imports monarch._src.actor"]),
        ("from monarch import _rust_bindings", ["imports monarch"]),
        ("def f(instance):\n    return instance._mailbox", ["uses ._mailbox"]),
        ("def f(job):\n    return getattr(job, '_host_to_pid', {})", ["uses ._host_to_pid"]),
        ("from monarch.actor import Channel\nport, receiver = Channel.open()", []),
        (
            "class A:\n    def f(self):\n        self._mailbox = self._mailbox + 1",
            [],
        ),
    ],
)
def test_a_use_of_the_private_api_is_found(tmp_path: Path, text: str, found: list[str]) -> None:
    write(tmp_path, "meshes/monarch/a.py", text)
    write(tmp_path, "neoproto/private_api/monarch.py", text)
    names = {"_mailbox", "_host_to_pid"}
    assert [one.partition(": ")[2] for one in private_uses(tmp_path, names)] == found


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
