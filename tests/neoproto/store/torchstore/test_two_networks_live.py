"""A store on two hosts with a network and a /dev/shm each: namespaces of this machine, joined by a cable."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.live

LIMIT_S = 120


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def networks():
    """Names of two network namespaces; 10.77.0.1 is in the first, 10.77.0.2 in the second."""
    names = [f"np-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"np{os.getpid() % 100_000}x{number}" for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(remove, name)
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
            subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces can be made here: {error} {getattr(error, 'stderr', '')}")
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def remove(network):
    for pid in ip("netns", "pids", network).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", network)


def program(network, log, *arguments, alone=False):
    """One of `two_hosts`, in a network; `alone` with a /dev/shm of its own."""
    command = [sys.executable, "-m", "tests.neoproto.store.torchstore.two_hosts", *arguments]
    if alone:
        run = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "bash", "-c", run, "bash", *command]
    with log.open("w") as out:
        inside = ["ip", "netns", "exec", network, *command]
        return subprocess.Popen(inside, stdout=out, stderr=out, start_new_session=True)


def test_two_networks_have_a_volume_each_and_reach_each_others_rows(networks, tmp_path):
    first, second = networks
    hosts = ["tcp://10.77.0.1:26600", "tcp://10.77.0.2:26600"]
    logs = [tmp_path / name for name in ("host0", "host1", "controller")]
    programs = [
        program(first, logs[0], "serve", hosts[0]),
        program(second, logs[1], "serve", hosts[1], alone=True),
        program(first, logs[2], "control", "tcp://10.77.0.1:26601", *hosts),
    ]
    try:
        code = programs[2].wait(LIMIT_S)
    finally:
        for one in programs:
            one.kill()
            one.wait()
    said = [log.read_text() for log in logs]
    # Not the last line: on a busy machine Monarch writes of its own time limit when the program exits.
    assert (code, "held" in said[2].splitlines()) == (0, True), "\n".join(said)
