"""The guardians of hosts: what they do while the controller lives, when it closes, and when it is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshes.guardian import MARK, marked_processes
from meshes.guards import HostGuards, start_guardian

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def guards() -> Iterator[HostGuards]:
    made = HostGuards("127.0.0.1", 2)
    yield made
    made.close()


def marked(run_id: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id}, start_new_session=True)
    until = time.monotonic() + 10
    while process.pid not in marked_processes(run_id) and time.monotonic() < until:
        time.sleep(0.01)
    return process


def guardians(run_id: str) -> list[str]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.fsencode(run_id) in Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0"):
                found.append(entry)
    return found


def test_a_close_ends_what_is_left_and_says_so(guards: HostGuards, run_id: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("tmp0", "tmp1", "more")]
    for number in (0, 1):
        folders[number].mkdir()
        start_guardian(guards.address, run_id, f"m[{number}]", str(tmp_path / f"tmp{number}"))
    guards.accept(2)
    file = Path("/dev/shm") / f"np-{run_id}-x"
    folders[2].mkdir()
    file.touch()
    guards.tell(f"dir {folders[2]}", "m[1]")
    guards.tell(f"shm np-{run_id}")
    process = marked(run_id)
    assert guards.sweep(10.0, again=False) == {}
    assert process.wait(10) == -9
    assert [path for path in [*folders, file] if path.exists()] == []
    assert guardians(run_id) == []


def test_a_controller_that_is_gone_ends_the_run_and_what_was_just_being_started(run_id: str) -> None:
    guards = HostGuards("127.0.0.1", 1)
    start_guardian(guards.address, run_id, "m[0]", "/nowhere/x")
    guards.accept(1)
    first = marked(run_id)
    guards.close()
    assert first.wait(10) == -9
    late = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id}, start_new_session=True)
    assert late.wait(15) == -9


def test_one_process_is_ended_if_it_is_the_runs(guards: HostGuards, run_id: str) -> None:
    start_guardian(guards.address, run_id, "m[0]", "/nowhere/x")
    guards.accept(1)
    ours, other = marked(run_id), subprocess.Popen(SLEEP)
    guards.tell(f"kill {other.pid}", "m[0]")
    guards.tell(f"kill {ours.pid}", "m[0]")
    assert ours.wait(10) == -9
    assert other.poll() is None
    other.kill()
    other.wait()


def test_strangers_are_not_let_in(guards: HostGuards, run_id: str) -> None:
    where = (guards.address.host, guards.address.port)
    with socket.create_connection(where) as stranger:
        stranger.sendall(b"0" * 32 + b" m[0]\n")
        start_guardian(guards.address, run_id, "m[0]", "/nowhere/x")
        guards.accept(1)
        guards.tell("dir /nowhere")
        assert stranger.recv(100) == b""
    assert guards.address.token not in repr(guards.address)


def test_a_guardian_that_is_gone_is_named(guards: HostGuards) -> None:
    with socket.create_connection((guards.address.host, guards.address.port)) as guardian:
        guardian.sendall(f"{guards.address.token} m[0]\n".encode())
        guards.accept(1)
    guards.tell("dir /nowhere")
    assert set(guards.sweep(1.0, again=True)) == {"m[0]"}


def test_a_guardian_that_does_not_come_is_not_waited_for_for_ever(
    guards: HostGuards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshes.guards.CONNECT_S", 0.05)
    with pytest.raises(TimeoutError):
        guards.accept(1)
