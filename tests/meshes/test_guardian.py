from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from meshes.guardian import MARK, Guardian, marked_processes, sweep

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]

PROGRAM = """
import os, subprocess, sys
from meshes.guardian import MARK, Guardian
run_id, folder = sys.argv[1:]
guardian = Guardian(run_id)
guardian.guard_dir(folder)
guardian.guard_shm(f"np-{run_id}")
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                         env={**os.environ, MARK: run_id}, start_new_session=True)
print(child.pid, guardian._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_sweep_ends_marked_processes_and_no_others(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    marked = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id}, start_new_session=True)
    bystander = subprocess.Popen(SLEEP, env={**os.environ, MARK: run_id + "x"})
    folder = tmp_path / "sockets"
    folder.mkdir()
    shm = Path("/dev/shm") / f"np-{run_id}-segment"
    shm.write_text("x")
    until = time.monotonic() + 10
    while not marked_processes(run_id) and time.monotonic() < until:
        time.sleep(0.01)  # a child carries our environment until it has run exec
    assert marked_processes(run_id) == [marked.pid]
    assert sweep(run_id, [str(folder)], [f"np-{run_id}"]) == []
    assert marked.wait(10) == -9
    assert bystander.poll() is None
    assert not folder.exists()
    assert not shm.exists()
    bystander.kill()
    bystander.wait()


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
    assert sweep(run_id, []) == []
    process.wait(10)
    assert not semaphore.exists()


def test_a_killed_controller_is_cleaned_up_after(tmp_path: Path) -> None:
    run_id, folder = uuid.uuid4().hex, tmp_path / "sockets"
    folder.mkdir()
    shm = Path("/dev/shm") / f"np-{run_id}-segment"
    shm.write_text("x")
    controller = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, run_id, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    child, guardian = map(int, controller.stdout.readline().split())
    assert os.getsid(guardian) == guardian, "a Ctrl-C in the terminal does not reach it"
    controller.kill()
    controller.communicate()
    until = time.monotonic() + 15
    while (folder.exists() or shm.exists() or marked_processes(run_id)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()
    assert not shm.exists()
    assert child not in marked_processes(run_id)


FORKING = """
import os, sys, time
from meshes.guardian import Guardian
guardian = Guardian("none")
guardian.guard_dir(sys.argv[1])
child = os.fork()
if not child:
    guardian.guard_dir("nothing")  # says nothing there, as `dismiss` does
    guardian.dismiss()
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_does_not_keep_the_guardian_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    controller = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    with controller.stdout as out:
        child = int(out.readline())
    try:
        time.sleep(0.5)
        assert folder.exists()
        controller.kill()
        controller.wait(10)
        until = time.monotonic() + 15
        while folder.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not folder.exists()
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_dismissed_guardian_goes_and_touches_nothing(tmp_path: Path) -> None:
    guardian = Guardian(uuid.uuid4().hex)
    guardian.guard_dir(str(tmp_path))
    guardian.dismiss()
    assert guardian._process.returncode == 0
    assert tmp_path.exists()


def test_a_dead_guardian_does_not_end_the_run(tmp_path: Path) -> None:
    guardian = Guardian(uuid.uuid4().hex)
    guardian._process.kill()
    guardian._process.wait()
    guardian.guard_dir(str(tmp_path))
    guardian.dismiss()
