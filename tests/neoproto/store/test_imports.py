from __future__ import annotations

import subprocess
import sys


def test_processes_that_only_move_bytes_do_not_import_torch() -> None:
    """It takes them seconds and hundreds of megabytes: index, volumes, registry, workers without tensors."""
    program = (
        "import sys, meshes.monarch.container, neoproto.store.torchstore.actors as engine;"
        "import neoproto.store.codec as codec;"
        "value = {'a': [1, b'x' * 1000], 'b': __import__('numpy').arange(5)};"
        "codec.decode(*codec.encode(value));"
        "from actors.weight_registry import RegistryWorker; RegistryWorker();"
        "from neoproto.weights import TensorLayout; TensorLayout(dtype='bfloat16', shape=(2,)).nbytes;"
        "print(sorted({'torch', 'torchstore', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
