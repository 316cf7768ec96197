"""A run on two hosts with a network, a name, processes and a /dev/shm each, by their addresses.

network 1: host 0, controller (each with process ids of its own)      network 2: host 1
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshes.common.guardian import marked_processes
from tests.meshes.applied import MONARCH, ROOT
from tests.neoproto.store.torchstore.test_two_networks_live import networks

pytestmark = pytest.mark.live

__all__ = ["networks"]
LIMIT_S = 150.0
ADDRESSES = ["tcp://10.77.0.1:26600", "tcp://10.77.0.2:26600"]
NAMED = """
hostname np-named
printf '127.0.0.1 localhost\\n192.0.2.2 np-named\\n' > "$1"
mount --bind "$1" /etc/hosts && shift
mount -t tmpfs -o size=160k tmpfs /dev/shm
ip link set lo up && ip link add np0 type veth peer name np1
ip addr add 192.0.2.2/24 dev np0 && ip link set np0 up && ip link set np1 up
exec "$@"
"""
ALONE = """
hostname np-host$1; shift
printf '127.0.0.1 localhost\\n10.77.0.1 np-host1\\n10.77.0.2 np-host2\\n' > "$1"
mount --bind "$1" /etc/hosts
shift
mount -t tmpfs tmpfs /dev/shm && "$@" & wait $!
code=$?; sleep 20; exit $code
"""


class Machines:
    """Programs in namespaces of their own, in one of the two networks."""

    def __init__(self, networks: list[str], folder: Path) -> None:
        self._networks, self.folder = networks, folder
        self._programs: list[subprocess.Popen[bytes]] = []

    def start(self, number: int, log: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program on a machine of its own in network 1 or 2."""
        names = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = ["bash", "-c", ALONE, "bash", str(number), str(self.folder / f"{log}.hosts")]
        with (self.folder / log).open("wb") as out:
            program = subprocess.Popen(
                ["ip", "netns", "exec", self._networks[number - 1], "unshare", *names, *inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "NEOPROTO_WORKERS": " ".join(ADDRESSES)},
                start_new_session=True,
            )
        self._programs.append(program)
        return program

    def run(self, log: str, mode: str, run_dir: str) -> dict[str, object]:
        """Start `two_hosts` beside host 0; what it says."""
        self.start(1, log, sys.executable, "-m", "tests.meshes.two_hosts", mode, str(self.folder / run_dir))
        return json.loads(self.wait_for(log, "{"))  # type: ignore[no-any-return]

    def wait_for(self, log: str, start: str) -> str:
        """The first line of a log that begins so."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and "Traceback" not in (said := (self.folder / log).read_text()):
            for line in said.splitlines():
                if line.startswith(start):
                    return line
            time.sleep(0.1)
        raise AssertionError("\n".join(path.read_text() for path in self.folder.glob("log-*")))

    def wait_for_the_end(self, log: str) -> None:
        """Until a run has closed, and its controller has gone: it removes its client's folder last."""
        self.wait_for(log, "closed")
        until = time.monotonic() + 20
        while controllers(self.folder):
            assert time.monotonic() < until
            time.sleep(0.1)

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait()


@pytest.fixture
def machines(networks: list[str], tmp_path: Path) -> Iterator[Machines]:
    made = Machines(networks, tmp_path)
    try:
        for number, address in enumerate(ADDRESSES, start=1):
            made.start(number, f"log-host{number}", sys.executable, "-m", "scripts.jobs.serve", address)
        time.sleep(3)
        made.start(1, "log-apply", str(MONARCH), "apply", "scripts.jobs.workers.job")
        made.wait_for("log-apply", "Job is ready")
        yield made
    finally:
        made.close()


def gone(run_id: str, seconds: float) -> list[int]:
    until = time.monotonic() + seconds
    while (left := marked_processes(run_id)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def folders(run_id: str) -> list[Path]:
    return list(Path("/tmp").glob(f"np-{run_id}-*"))


@pytest.mark.core
def test_groups_and_store_span_two_hosts_and_the_next_run_does_too(machines: Machines) -> None:
    for name in ("first", "second"):
        told = machines.run(f"log-{name}", "close", name)
        places = told["places"]
        assert isinstance(places, list)
        assert [place["host"] for place in places] == ["np-host1", "np-host2"]
        assert len({place["temporary"] for place in places}) == 2
        assert told["beside"] == "np-host1"
        assert told["listens"] == ["0.0.0.0", "10.77.0.1", "127.0.0.1"], "as docs/security.md says"
        assert told["sums"] == [[0.0, 0.0], [40.0, 40.0], [40.0]]
        assert (told["reduced"], told["here"]) == ([3.0, 3.0], 4000.0)
        run_id = str(told["run_id"])
        assert gone(run_id, 20) == []
        machines.wait_for_the_end(f"log-{name}")
        assert folders(run_id) == []


def test_a_killed_controller_leaves_nothing_on_the_other_machine(machines: Machines) -> None:
    """Its own guardian cannot see, let alone end, the processes there."""
    told = machines.run("log-killed", "wait", "killed")
    run_id = str(told["run_id"])
    assert len(marked_processes(run_id)) >= 5
    assert len(folders(run_id)) == 3
    (controller,) = controllers(machines.folder)
    os.kill(controller, signal.SIGKILL)
    assert gone(run_id, 15) == []
    time.sleep(1)
    assert folders(run_id) == []
    told = machines.run("log-next", "close", "next")
    assert gone(str(told["run_id"]), 20) == []
    machines.wait_for_the_end("log-next")


def test_one_machine_listens_on_loopback_alone_and_needs_no_shared_memory(
    networks: list[str], tmp_path: Path
) -> None:
    """Its name has another address, and /dev/shm has room for the volumes' tables alone.

    Nothing else listens in a network of its own.
    """
    inside = ["unshare", "--mount", "--uts", "bash", "-c", NAMED, "bash", str(tmp_path / "hosts")]
    program = [sys.executable, "-m", "tests.meshes.two_hosts", "close", str(tmp_path / "run"), "process"]
    done = subprocess.run(
        ["ip", "netns", "exec", networks[0], *inside, *program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[0])
    assert (told["reduced"], told["places"][0]["host"]) == ([3.0, 3.0], "np-named")
    assert told["listens"] == ["127.0.0.1"]
    assert told["sums"] == [[0.0, 0.0], [40.0, 40.0], [40.0]]
    log = (tmp_path / "run" / "logs" / "store" / "volume0.log").read_text()
    assert re.search(rf"/dev/shm has no room for \d+ bytes: files in \S*/np-{told['run_id']}-", log)
    assert folders(told["run_id"]) == []


def controllers(folder: Path) -> list[int]:
    """The Python processes of `two_hosts`, by their runs' folder."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            ours = any(word.startswith(os.fsencode(folder)) for word in words[4:])
            if words[0] == os.fsencode(sys.executable) and b"tests.meshes.two_hosts" in words and ours:
                found.append(int(entry))
    return found
