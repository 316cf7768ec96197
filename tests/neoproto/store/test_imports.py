from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.architecture.imports import Import, imports_of, sources

ROOT = Path(__file__).resolve().parents[3]
TORCHSTORE = "neoproto/store/torchstore/"


def names_an_engine(item: Import) -> bool:
    full = f"{item.module}.{item.name}."
    return full.startswith(("monarch.", "torchstore.", "neoproto.engines.", "neoproto.store.torchstore."))


def test_what_any_store_needs_knows_no_engine() -> None:
    """So that a second backend's store is a folder beside `torchstore`, and touches nothing else."""
    checked = 0
    for path in sources(ROOT):
        where = path.relative_to(ROOT).as_posix()
        if where.startswith("neoproto/store/") and not where.startswith(TORCHSTORE):
            assert [item for item in imports_of(path, ROOT) if names_an_engine(item)] == []
            checked += 1
    assert checked > 8


def test_only_its_backend_imports_the_torchstore_folder() -> None:
    wrong = [
        item
        for path in sources(ROOT)
        if not path.relative_to(ROOT).as_posix().startswith((TORCHSTORE, "meshes/monarch/", "scripts/"))
        for item in imports_of(path, ROOT)
        if f"{item.module}.{item.name}.".startswith("neoproto.store.torchstore.")
    ]
    assert wrong == []


def test_processes_that_only_move_bytes_do_not_import_torch() -> None:
    """It takes them seconds and hundreds of megabytes: index, volumes, registry, workers without tensors."""
    program = (
        "import sys, meshes.monarch.container, neoproto.store.torchstore.engine as engine;"
        "import neoproto.store.codec as codec;"
        "value = {'a': [1, b'x' * 1000], 'b': __import__('numpy').arange(5)};"
        "codec.decode(*codec.encode(value));"
        "from actors.weight_registry import RegistryWorker; RegistryWorker();"
        "from neoproto.weights import TensorLayout; TensorLayout(dtype='bfloat16', shape=(2,)).nbytes;"
        "print(sorted({'torch', 'torchstore', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
