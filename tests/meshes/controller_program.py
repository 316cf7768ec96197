"""A controller in a process of its own, to be ended in every way.

    python -m tests.meshes.controller_program MODE DIR [JOB_MODE]

Prints one line of JSON once it is up, then does what MODE says: "close", "raise", "wait", "stuck" (a call
runs for a minute), "exit" (leaves without closing), "closed" (closes, says so in another line, waits); with
"start", says so before it starts, and so with "killed NAME", which is killed as soon as it has made a folder
whose name begins so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from neoproto.runtime import ClassWithInitArgs, Runtime, put
from tests.meshes.workers import Probe


def tell_before_the_start() -> None:
    start = Runtime._start

    def told(runtime: Runtime) -> None:
        print(json.dumps({"run_id": runtime.run_id, "pid": os.getpid()}), flush=True)
        start(runtime)

    Runtime._start = told  # type: ignore[method-assign]


def be_killed_at(name: str) -> None:
    mkdir = os.mkdir

    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if os.path.basename(path).startswith(name):
            os.kill(os.getpid(), signal.SIGKILL)

    os.mkdir = made


def main(mode: str, run_dir: str, job_mode: str = "process") -> None:
    mode, _, name = mode.partition(" ")
    if mode in ("start", "killed"):
        tell_before_the_start()
    if mode == "killed":
        be_killed_at(name)
    store = {"store_name_prefix": "an_odd-prefix"}
    monarch = {"job_mode": job_mode, "object_store": store}
    runtime = Runtime.from_config({"runtime": {"run_dir": run_dir, "monarch": monarch}})
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe, preload=("colorsys",)), on=runtime.create_resource_pool(1, 2), name="w"
    )
    pids = [one["pid"] for one in group.whoami()]
    put(b"x" * 5_000_000)
    left = {
        "files": group.leave_a_file(),
        "temporary": group.environment("TMPDIR"),
        "cache": group.environment("TORCHINDUCTOR_CACHE_DIR"),
    }
    if mode == "stuck":
        group.submit("sleep", (60.0,))
        group.submit("doze", (60.0,))
    print(json.dumps({"run_id": runtime.run_id, "pids": pids, "pid": os.getpid(), **left}), flush=True)
    if mode == "exit":
        return
    with runtime:
        if mode == "raise":
            raise RuntimeError("on purpose")
        if mode in ("wait", "stuck"):
            time.sleep(120)
    if mode == "closed":
        print("closed", flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main(*sys.argv[1:])
