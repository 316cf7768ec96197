from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

REFUSED_TWICE = """
import os, sys, tempfile
from pathlib import Path
from meshes.monarch import sdk
from neoproto.errors import ConfigError

def refuse():
    raise ConfigError("no job")

for _ in range(2):
    try:
        sdk.start_client(Path(sys.argv[1]), refuse)
    except ConfigError:
        print(len(list(Path(tempfile.gettempdir()).glob(f"np-client-{os.getpid()}-*"))))
print(os.getpid())
"""


def test_a_refused_start_that_is_tried_again_makes_no_second_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_TWICE, str(tmp_path / "log")],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    *counts, pid = done.stdout.split()
    assert counts == ["1", "1"]
    assert list(Path(tempfile.gettempdir()).glob(f"np-client-{pid}-*")) == []
