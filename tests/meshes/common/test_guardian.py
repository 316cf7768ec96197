"""What a guardian ends and removes, and what it leaves alone. Folders are those of the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from meshes.common import guardian as guardian_module
from meshes.common.guardian import (
    MARK,
    OWNER_FILE,
    Folder,
    Guarded,
    check_shm_prefix,
    marked_processes,
    path_word,
    read_message,
    sweep,
    write_message,
)
from meshes.common.guards import new_folder

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def made(path: Path) -> Folder:
    folder = new_folder(str(path))
    folder.make()
    (path / "socket").touch()
    (path / "below").mkdir()
    (path / "below" / "file").touch()
    return folder


def test_a_sweep_ends_marked_processes_and_no_others(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    marked = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id}, start_new_session=True)
    bystander = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id + "x"})
    folder = made(tmp_path / "sockets")
    shm = Path("/dev/shm") / f"np-{run_id}-segment"
    shm.write_text("x")
    assert wait_for(lambda: marked_processes(run_id) == [marked.pid])  # not before it has run exec
    assert sweep(run_id, [folder], [f"np-{run_id}"]) == ([], {})
    assert marked.wait(10) == -9
    assert bystander.poll() is None
    assert not (tmp_path / "sockets").exists()
    assert not shm.exists()
    bystander.kill()
    bystander.wait()


def test_no_process_carries_an_empty_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(SLEEP, env={**os.environ, MARK: ""}) as process:
        assert marked_processes("") == []
        process.kill()


NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, b"x\\xd0)\\n Z (\\xff", 0, 0, 0)
print("named", flush=True)
time.sleep(60)
"""


def test_names_that_are_not_utf8_keep_no_sweep_from_its_work() -> None:
    """The kernel cuts names at 15 bytes, in the middle of a letter too."""
    run_id = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", NAMED, os.fsdecode(b"\xff\xd0")],
        env={**os.environ, MARK: run_id, "ODD": os.fsdecode(b"\xff")},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"named\n"
    assert sweep(run_id, []) == ([], {})
    assert process.wait(10) == -9


SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""


def test_a_sweep_removes_the_semaphores_of_the_processes_it_kills() -> None:
    """Python's resource tracker would, but it carries the mark and is killed too."""
    run_id = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", SEMAPHORE],
        env={**os.environ, MARK: run_id},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as out:
        semaphore = Path("/dev/shm") / f"sem.{out.readline().strip().removeprefix('/')}"
    assert semaphore.exists()
    assert sweep(run_id, []) == ([], {})
    process.wait(10)
    assert not semaphore.exists()


def replaced(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "precious").touch()


def replaced_by_an_empty_one(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replaced_by_a_copy(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"), symlinks=True)
    path.rename(path.with_name("moved"))
    path.with_name("copy").rename(path)


def replaced_by_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replaced_by_another_runs(path: Path) -> None:
    shutil.rmtree(path)
    made(path)


@pytest.mark.parametrize(
    "change",
    [replaced, replaced_by_an_empty_one, replaced_by_a_copy, replaced_by_a_link, replaced_by_another_runs],
)
def test_what_is_no_longer_the_runs_folder_stays(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = made(tmp_path / "sockets")
    change(tmp_path / "sockets")
    before = sorted(tmp_path.rglob("*"))
    assert "not the folder that was made" in folder.remove()
    assert sorted(tmp_path.rglob("*")) == before


def test_links_in_a_folder_are_not_followed_and_what_is_moved_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    folder = made(tmp_path / "sockets")
    (tmp_path / "sockets" / "link").symlink_to(victim)
    (tmp_path / "sockets" / "below" / "link").symlink_to(victim)
    assert folder.remove() == ""
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["victim", "precious"]
    assert folder.remove() == "", "twice is nothing"
    moved = made(tmp_path / "sockets")
    (tmp_path / "sockets").rename(tmp_path / "mine")
    assert moved.remove() == ""
    assert (tmp_path / "mine" / "socket").exists()


def test_a_folder_with_a_file_system_in_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "sockets")
    inside = os.fsencode(tmp_path / "sockets" / "below")
    monkeypatch.setattr(guardian_module.procs, "mount_points", lambda: [b"/", inside])
    assert folder.remove() == "a file system is mounted in it"
    assert (tmp_path / "sockets" / "below" / "file").exists()
    monkeypatch.setattr(guardian_module.procs, "mount_points", lambda: [b"/", inside[:-6]])
    assert "file system" in folder.remove()
    monkeypatch.setattr(guardian_module.procs, "mount_points", lambda: [b"/", inside[:-7]])
    assert folder.remove() == ""


def test_a_folder_that_something_is_still_put_into_keeps_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "sockets")
    monkeypatch.setattr(guardian_module, "_empty", lambda _: None)
    assert "not all of it" in folder.remove()
    monkeypatch.undo()
    assert folder.remove() == ""
    assert not (tmp_path / "sockets").exists()


def test_a_folder_whose_maker_was_killed_goes_only_if_it_is_empty(tmp_path: Path) -> None:
    folder = new_folder(str(tmp_path / "sockets"))
    (tmp_path / "sockets").mkdir()
    (tmp_path / "sockets" / "precious").touch()
    assert folder.remove() != ""
    (tmp_path / "sockets" / "precious").unlink()
    assert folder.remove() == ""
    assert not (tmp_path / "sockets").exists()


def test_prefixes_have_the_id_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian_module.procs, "SHM_DIR", str(tmp_path))
    run_id = uuid.uuid4().hex
    other, folder, link, mine = (
        tmp_path / name
        for name in (f"np-{uuid.uuid4().hex}", f"np-{run_id}-folder", f"np-{run_id}-link", f"np-{run_id}-x")
    )
    other.touch()
    mine.touch()
    folder.mkdir()
    link.symlink_to(other)
    for prefix in ("", "np-", other.name[:5], f"np-{run_id[:-1]}"):
        with pytest.raises(ValueError, match="the id of their run"):
            check_shm_prefix(run_id, prefix)
        sweep(run_id, [], [prefix])
        assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(ValueError, match="the id of their run"):
        check_shm_prefix("", "")
    sweep(run_id, [], [f"np-{run_id}"])
    assert sorted(tmp_path.iterdir()) == sorted((other, folder, link))


@pytest.mark.parametrize("name", ["vic\nx", "a b", 'q"\\', os.fsdecode(b"\xff\xd0"), "…"])
def test_any_path_is_told_as_it_is(name: str, tmp_path: Path) -> None:
    guarded = Guarded("r")
    line = write_message("dir", path_word(str(tmp_path / name)), "owner")
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    guarded.record(read_message(line))
    assert list(guarded.folders) == [os.fsencode(tmp_path / name)]


def test_a_message_that_is_cut_off_or_odd_is_none(tmp_path: Path) -> None:
    guarded = Guarded("r")
    line = write_message("dir", str(tmp_path / "victim-x"), "owner")
    for end in range(len(line) - 1):  # as a connection that ends may leave it
        guarded.record(read_message(line[:end]))
    for odd in (["dir", "relative", "owner"], ["dir", "/x", ""], ["kill", "x"], ["dir", "\u0416", "o"], []):
        guarded.record(odd)
    for word in (b"7\n", b"{}\n", b"\xff\n", b"\n"):
        assert read_message(word) == []
    assert guarded.folders == {}
    assert not guarded.done


PROGRAM = """
import os, subprocess, sys
from meshes.common.guardian import MARK
from meshes.common.guards import Guardian
run_id, folder = sys.argv[1:]
guardian = Guardian(run_id)
guardian.make_folder(folder)
guardian.guard_shm(f"np-{run_id}")
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                         env={**os.environ, MARK: run_id}, start_new_session=True)
print(child.pid, guardian.pid, flush=True)
for line in sys.stdin:
    while guardian._starts == int(line):
        pass
    print(guardian.pid, flush=True)
"""


@pytest.mark.parametrize("fate", ["lives", "SIGKILL", "SIGSTOP"])
def test_a_killed_controller_is_cleaned_up_after(fate: str, tmp_path: Path) -> None:
    """By the guardian, or by the one that took its place; nothing that its folder's name begins like goes."""
    run_id, victim = uuid.uuid4().hex, tmp_path / "vic"
    folder = tmp_path / "vic\nx"
    victim.mkdir()
    shm = Path("/dev/shm") / f"np-{run_id}-segment"
    shm.write_text("x")
    controller = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, run_id, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    assert controller.stdin is not None
    child, guardian = map(int, controller.stdout.readline().split())
    assert os.getsid(guardian) == guardian, "a Ctrl-C in the terminal does not reach it"
    (folder / "file").touch()
    if fate != "lives":
        os.kill(guardian, signal.Signals[fate])
        controller.stdin.write("1\n")
        controller.stdin.flush()
        assert int(controller.stdout.readline()) != guardian
        assert not Path(f"/proc/{guardian}").exists()
    controller.kill()
    controller.communicate()
    assert wait_for(lambda: not (folder.exists() or shm.exists() or marked_processes(run_id)))
    assert child not in marked_processes(run_id)
    assert victim.exists()


FORKING = """
import os, sys, time
from meshes.common.guards import Guardian
guardian = Guardian("none")
guardian.make_folder(sys.argv[1])
child = os.fork()
if not child:
    guardian._tell("dir", "/nothing", "x")  # says nothing there, as `dismiss` does
    guardian.dismiss()
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_does_not_keep_the_guardian_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    controller = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    with controller.stdout as out:
        child = int(out.readline())
    try:
        time.sleep(0.5)
        assert (folder / OWNER_FILE).is_symlink()
        controller.kill()
        controller.wait(10)
        assert wait_for(lambda: not folder.exists())
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
