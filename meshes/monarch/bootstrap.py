"""Entry point of every process that Monarch starts: a fresh one, or one that is forked from a warm parent."""

from __future__ import annotations

import os
import runpy
import sys

from meshes.common.bootstrap import PARENT_VARIABLE, leave, prepare


def main() -> None:
    """Prepare the process, and run Monarch's own bootstrap."""
    prepare()
    from neoproto.private_api.monarch import BOOTSTRAP  # late: what is printed from here on is in the log

    try:
        runpy.run_module(BOOTSTRAP, run_name="__main__")
    except SystemExit as end:
        leave(end.code)


def main_of_forked() -> None:
    """The same in a child of a warm parent (`meshes/common/warm.py`)."""
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    # Monarch has the kernel end a process with its parent. The warm one may die, and its workers live on:
    # they end with their stubs, and those with the host.
    os.environ["HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG"] = "false"
    sys.argv[:] = [__name__]
    main()


if __name__ == "__main__":
    main()
