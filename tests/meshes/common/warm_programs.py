"""What the tests of the warm parent have forked, and a host of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType


def main() -> None:
    """A worker, forked or fresh: reports what it is, then does as `$NEOPROTO_DO` says."""
    signal.signal(signal.SIGTERM, _leave)
    report = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "arguments": sys.argv[1:],
        "modules": [name for name in ("colorsys", "wave", "with_thread") if name in sys.modules],
        "environment": dict(os.environ),
        "files": _files(),
        "number": random.random(),
        "path": sys.path,
        "children": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
    }
    path = Path(os.environ["NEOPROTO_REPORT"])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(path)
    print("printed by a worker", flush=True)
    match os.environ.get("NEOPROTO_DO", ""):
        case "wait":
            while True:
                time.sleep(60)
        case "raise":
            raise ValueError("a worker's failure")
        case code:
            os._exit(int(code or 0))


def _files() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(7)


def host() -> None:
    """A host that starts one stub: its arguments, after the file that the worker prints to."""
    with open(sys.argv[2], "ab") as log:
        subprocess.run([sys.executable, *sys.argv[3:]], stdout=log, stderr=log, check=False)


if __name__ == "__main__":
    host() if sys.argv[1:2] == ["host"] else main()
