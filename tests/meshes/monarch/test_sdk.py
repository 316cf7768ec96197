from __future__ import annotations

import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshes.common import machine
from meshes.monarch import sdk

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


def test_monarchs_log_may_be_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("meshes.monarch.sdk.pwd.getpwuid", unknown)
    log = sdk.monarch_log(tmp_path)
    assert log == tmp_path / "unknown" / "monarch_log.log"
    refused: set[Path] = set()
    monkeypatch.setattr("meshes.common.machine.os.access", lambda path, _: path not in refused)
    assert machine.can_be_written(log), "both can be made"
    log.parent.mkdir()
    refused.add(log.parent)
    assert not machine.can_be_written(log)
    log.touch()
    assert machine.can_be_written(log), "it is there already"
    refused.add(log)
    assert not machine.can_be_written(log)
