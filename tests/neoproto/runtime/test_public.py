"""What `neoproto.runtime` offers, and that it is offered without loading what is not asked for."""

from __future__ import annotations

import subprocess
import sys


def test_everything_promised_can_be_imported() -> None:
    import neoproto.runtime
    from neoproto.runtime import (  # noqa: F401
        ClassWithInitArgs,
        Dispatch,
        Execute,
        RemoteCall,
        RemoteWorkerGroup,
        ResourcePool,
        Runtime,
        Worker,
        WorkerGroup,
        current_runtime,
        delete,
        delete_batch,
        get,
        get_batch,
        put,
        put_batch,
        register,
    )

    for name in neoproto.runtime.__all__:
        assert getattr(neoproto.runtime, name) is not None


def test_a_worker_module_loads_neither_torch_nor_monarch() -> None:
    program = "import sys; from neoproto.runtime import Worker, register; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "monarch", "neoproto.runtime.runtime"} & set(done.stdout.split()) == set()
