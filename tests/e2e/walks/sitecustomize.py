"""Notes which functions of ours run in this process while a window is open; Python imports it when it starts.

NEOPROTO_WALKS: a folder, with the file `window` (its byte is the open window, 0: none). Each process
writes PID.json there when it ends: [window, file, function, when it was first called] of each that ran.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

FOLDER = os.environ.get("NEOPROTO_WALKS", "")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
OURS = tuple(os.path.join(ROOT, name) + os.sep for name in ("neoproto", "meshes", "actors"))


def install() -> None:
    with open(os.path.join(FOLDER, "window"), "rb") as file:
        window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen: dict[tuple[int, Any], float] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and window[0]:
            seen.setdefault((window[0], frame.f_code), time.monotonic())

    def write() -> None:
        sys.setprofile(None)
        found = [
            (number, os.path.relpath(code.co_filename, ROOT), code.co_qualname, when)
            for (number, code), when in seen.copy().items()
            if code.co_filename.startswith(OURS)
        ]
        with open(os.path.join(FOLDER, f"{os.getpid()}.json"), "w", encoding="utf-8") as out:
            json.dump(found, out)

    threading.setprofile(note)
    sys.setprofile(note)
    atexit.register(write)


if FOLDER:
    install()
