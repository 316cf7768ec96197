"""The guardians of hosts: what they do while the controller lives, when it closes, and when it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshes.common.guardian import MARK, marked_processes, write_message
from meshes.common.guards import Guardian, HostGuards, new_folder, start_guardian

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
    folders = [tmp_path / name for name in ("tmp0", "tmp1\n", "more")]
    made = [new_folder(str(path)) for path in folders]
    for number in (0, 1):
        start_guardian(guards.address, run_id, f"m\n[{number}]", made[number])
    guards.accept(2)
    for folder in made:
        folder.make()
    file = Path("/dev/shm") / f"np-{run_id}-x"
    file.touch()
    guards.tell("dir", str(folders[2]), made[2].owner, name="m\n[1]")
    guards.tell("shm", f"np-{run_id}")
    process = marked(run_id)
    assert guards.sweep(10.0, again=False) == {}
    assert process.wait(10) == -9
    assert [path for path in [*folders, file] if path.exists()] == []
    assert guardians(run_id) == []


def test_a_controller_that_is_gone_ends_the_run_and_what_was_just_being_started(run_id: str) -> None:
    guards = HostGuards("127.0.0.1", 1)
    start_guardian(guards.address, run_id, "m[0]", new_folder("/nowhere/x"))
    guards.accept(1)
    first = marked(run_id)
    guards.close()
    assert first.wait(10) == -9
    late = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id}, start_new_session=True)
    assert late.wait(15) == -9


def test_one_process_is_ended_if_it_is_the_runs(guards: HostGuards, run_id: str) -> None:
    start_guardian(guards.address, run_id, "m[0]", new_folder("/nowhere/x"))
    guards.accept(1)
    ours, other = marked(run_id), subprocess.Popen(SLEEP)
    guards.tell("kill", other.pid, name="m[0]")
    guards.tell("kill", ours.pid, name="m[0]")
    assert ours.wait(10) == -9
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize(
    "said", [b'["' + b"0" * 32 + b'", "m[0]"]', rb'["\ud800", "x"]', b"[" * 1020, b"\xff"]
)
def test_strangers_are_not_let_in(guards: HostGuards, run_id: str, said: bytes) -> None:
    where = (guards.address.host, guards.address.port)
    with socket.create_connection(where) as stranger:
        stranger.sendall(said + b"\n")
        start_guardian(guards.address, run_id, "m[0]", new_folder("/nowhere/x"))
        guards.accept(1)
        guards.tell("dir", "/nowhere", "x")
        with contextlib.suppress(ConnectionResetError):  # it was closed before all was read
            assert stranger.recv(100) == b""
    assert guards.address.token not in repr(guards.address)


def test_a_guardian_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshes.common.guards.LOOK_S", 0.05)
    guards = HostGuards("127.0.0.1", 1)
    with socket.create_connection((guards.address.host, guards.address.port)) as guardian:
        guardian.sendall(write_message(guards.address.token, "m[0]"))
        guards.accept(1)
    until = time.monotonic() + 10
    while "the guardian of host m[0] has gone" not in caplog.text and time.monotonic() < until:
        time.sleep(0.02)
    assert caplog.text.count("the guardian of host m[0] has gone") == 1
    guards.tell("dir", "/nowhere", "x")
    assert set(guards.sweep(1.0, again=True)) == {"m[0]"}
    guards.close()


def test_a_guardian_that_does_not_come_is_not_waited_for_for_ever(
    guards: HostGuards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshes.common.guards.CONNECT_S", 0.05)
    with pytest.raises(TimeoutError):
        guards.accept(1)


def test_a_dismissed_guardian_goes_and_touches_nothing(tmp_path: Path) -> None:
    guardian = Guardian(uuid.uuid4().hex)
    guardian.make_folder(str(tmp_path / "sockets"))
    guardian.dismiss()
    assert guardian._process.returncode == 0
    assert (tmp_path / "sockets").exists()


def test_a_stopped_guardian_does_not_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshes.common.guards.GO_S", 0.2)
    guardian = Guardian(uuid.uuid4().hex)
    os.kill(guardian.pid, signal.SIGSTOP)
    guardian.dismiss()
    assert guardian._process.returncode == -signal.SIGKILL


def test_a_folder_that_is_there_already_is_not_guarded(tmp_path: Path) -> None:
    guardian = Guardian(uuid.uuid4().hex)
    with pytest.raises(FileExistsError):
        guardian.make_folder(str(tmp_path))
    with pytest.raises(ValueError, match="an absolute path, got 'relative'"):
        guardian.make_folder("relative")
    with pytest.raises(ValueError, match="the id of their run"):
        guardian.guard_shm("np-")
    assert (guardian.folders, guardian.shm_prefixes) == ([], [])
    guardian.dismiss()


def test_a_guardian_that_never_lives_is_given_up_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshes.common.guards.MOST_STARTS", 2)
    guardian = Guardian(uuid.uuid4().hex)
    first = guardian.pid
    for number in (1, 2):
        os.kill(guardian.pid, signal.SIGKILL)
        until = time.monotonic() + 10
        said = f"guardian {number} of run {guardian.run_id} died: signal 9"
        while said not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
    assert guardian.pid != first
    assert "if this process is killed now, its run stays behind" in caplog.text
    guardian.dismiss()
