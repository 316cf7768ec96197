"""What /proc says is bytes: names of processes, files and sockets of anybody may be any."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from meshes.common import procs
from meshes.common.stacks import read_stacks

NAMED = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"x\\xd0)\\n Z (\\xff", 0, 0, 0)
print("named", flush=True)
time.sleep(60)
"""


def test_a_process_of_an_odd_name_is_read(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", NAMED, os.fsdecode(b"\xff\xd0")],
        env={**os.environ, "ODD": os.fsdecode(b"\xff\n")},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"named\n"
    assert process.pid in procs.pids()
    assert b"ODD=\xff\n" in procs.environ(process.pid)
    assert procs.command(process.pid).endswith(r"\xff\xd0")
    assert procs.state(process.pid) in ("R", "S", "D")
    assert procs.lives(process.pid)
    assert not procs.is_stopped(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while not procs.is_stopped(process.pid) and time.monotonic() < until:
        time.sleep(0.01)
    log = tmp_path / "log"
    log.touch()
    assert "is stopped" in read_stacks({0: (process.pid, log)})[0]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert procs.state(process.pid) == "Z"
    assert not procs.lives(process.pid)
    process.wait()
    assert (procs.state(process.pid), procs.command(process.pid)) == ("", "")
    assert not procs.lives(process.pid)
    assert read_stacks({0: (process.pid, log)}) == {}


def test_sockets_of_others_with_odd_names_hide_none() -> None:
    word = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        # Not tmp_path: a socket's name has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        for name in (b"\0\xff\xd0\n", f"\0{word}".encode(), os.fsencode(folder / f"{word} \n")):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(name)
        assert sorted(procs.unix_sockets(word)) == [f"{folder / word} ", f"@{word}"]
        assert procs.unix_sockets(f"{word} \n") == [f"{word} \n"], "a name that is not in one line"
    assert procs.unix_sockets(uuid.uuid4().hex) == []


def test_shared_memory_is_known_by_device_and_inode() -> None:
    path = Path("/dev/shm") / f"np-{uuid.uuid4().hex}"
    odd = path.with_name(os.fsdecode(b"np-\xff" + path.name.encode()))
    try:
        import mmap

        maps = []
        for one in (path, odd):
            one.write_bytes(b"x")
            with one.open("rb") as file:
                maps.append(mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ))
        facts = [one.stat() for one in (path, odd)]
        assert {(one.st_dev, one.st_ino) for one in facts} <= procs.mapped_shm(os.getpid())
        for one in maps:
            one.close()
    finally:
        path.unlink()
        odd.unlink()


def test_threads_of_odd_names_are_listed() -> None:
    """At its end a program looks for Monarch's."""
    started, go = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes(b"\xd0\xff")
        started.set()
        go.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    assert b"\xd0\xff" in procs.thread_names()
    go.set()
    thread.join()


def test_mount_points_are_unescaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"/proc" in procs.mount_points()
    line = b"36 35 98:0 / /a\\040b\\012\\134\xff rw,noatime master:1 - ext4 /dev/root rw\n"
    monkeypatch.setattr(procs, "_read", lambda _: line)
    assert procs.mount_points() == [b"/a b\n\\\xff"]
