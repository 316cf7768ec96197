"""A controller in a process of its own, to be ended in every way.

    python -m tests.meshes.controller_program MODE DIR [JOB_MODE]

Prints one line of JSON once it is up, then does what MODE says: "close", "raise", "wait", "stuck" (a call
runs for a minute), "exit" (leaves without closing); with "start", says so before it starts.
"""

from __future__ import annotations

import json
import os
import sys
import time

from neoproto.runtime import ClassWithInitArgs, Runtime, put
from tests.meshes.workers import Probe


def tell_before_the_start() -> None:
    start = Runtime._start

    def told(runtime: Runtime) -> None:
        print(json.dumps({"run_id": runtime.run_id, "pid": os.getpid()}), flush=True)
        start(runtime)

    Runtime._start = told  # type: ignore[method-assign]


def main(mode: str, run_dir: str, job_mode: str = "process") -> None:
    if mode == "start":
        tell_before_the_start()
    store = {"store_name_prefix": "an odd/prefix"}
    monarch = {"job_mode": job_mode, "object_store": store}
    runtime = Runtime.from_config({"runtime": {"run_dir": run_dir, "monarch": monarch}})
    group = runtime.create_worker_group(
        ClassWithInitArgs(Probe), on=runtime.create_resource_pool(1, 2), name="w"
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


if __name__ == "__main__":
    main(*sys.argv[1:])
