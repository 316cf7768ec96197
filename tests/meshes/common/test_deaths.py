from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import time

import pytest

from meshes.common import deaths
from meshes.common.deaths import DeathWatch, describe_status

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_a_wait_status_is_put_into_words() -> None:
    assert describe_status(9) == "signal 9 (SIGKILL)"
    assert describe_status(3 << 8) == "exit code 3"


@pytest.fixture
def reports() -> queue.Queue[tuple[str, int, str | None]]:
    return queue.Queue()


def wait_for_cause(reports: queue.Queue[tuple[str, int, str | None]]) -> tuple[str, int, str]:
    while True:
        key, rank, cause = reports.get(timeout=10)
        if cause is not None:
            return key, rank, cause


def test_a_death_is_known_at_once_and_its_cause_soon(
    reports: queue.Queue[tuple[str, int, str | None]],
) -> None:
    watch = DeathWatch(lambda *report: reports.put(report))
    process = subprocess.Popen(SLEEP)
    watch.watch("g", 3, process.pid)
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    assert reports.get(timeout=10) == ("g", 3, None)
    process.wait()
    key, rank, cause = wait_for_cause(reports)
    assert (key, rank) == ("g", 3)
    assert cause == "signal 9 (SIGKILL)" or "neither" in cause
    assert time.monotonic() - started < 5
    watch.close()


def test_supervision_may_know_the_cause_first(reports: queue.Queue[tuple[str, int, str | None]]) -> None:
    watch = DeathWatch(lambda *report: reports.put(report))
    watch.report_cause("g", 0, "exit code 1")
    assert wait_for_cause(reports) == ("g", 0, "exit code 1")
    watch.close()


def test_a_released_group_is_not_reported(reports: queue.Queue[tuple[str, int, str | None]]) -> None:
    watch = DeathWatch(lambda *report: reports.put(report))
    before = len(os.listdir("/proc/self/fd"))
    process = subprocess.Popen(SLEEP)
    watch.watch("g", 0, process.pid)
    watch.forget("g")
    process.kill()
    process.wait()
    time.sleep(0.2)
    assert reports.empty()
    assert len(os.listdir("/proc/self/fd")) == before
    watch.close()


def test_a_process_that_is_gone_is_reported(reports: queue.Queue[tuple[str, int, str | None]]) -> None:
    watch = DeathWatch(lambda *report: reports.put(report))
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    watch.watch("g", 0, process.pid)
    assert wait_for_cause(reports)[:2] == ("g", 0)
    watch.close()


def test_a_process_that_stays_stopped_is_killed_and_reported_with_that_cause(
    reports: queue.Queue[tuple[str, int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "LOOK_S", 0.05)
    watch = DeathWatch(lambda *report: reports.put(report), stopped_timeout_s=0.4)
    process = subprocess.Popen(SLEEP)
    watch.watch("g", 1, process.pid)
    time.sleep(0.6)
    assert reports.empty()
    started = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert time.monotonic() - started >= 0.3
    key, rank, cause = wait_for_cause(reports)
    assert (key, rank) == ("g", 1)
    assert re.fullmatch(r"stopped by a signal for 0\.\d s, then killed", cause)
    watch.close()


def test_a_stopped_process_that_is_not_ours_is_reported_and_left_alone(
    reports: queue.Queue[tuple[str, int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "LOOK_S", 0.05)
    watch = DeathWatch(lambda *report: reports.put(report), stopped_timeout_s=0.2)
    process = subprocess.Popen(SLEEP)
    watch.watch("g", 1, process.pid, may_kill=False)
    os.kill(process.pid, signal.SIGSTOP)
    key, rank, cause = reports.get(timeout=10)
    assert (key, rank) == ("g", 1)
    assert re.fullmatch(r"stopped by a signal for \d\.\d s", cause or "")
    assert process.poll() is None
    watch.close()
    assert reports.empty()
    process.kill()
    process.wait()


def test_its_cause_is_not_that_it_was_killed_whoever_says_so_first(
    reports: queue.Queue[tuple[str, int, str | None]],
) -> None:
    watch = DeathWatch(lambda *report: reports.put(report))
    process = subprocess.Popen(SLEEP)
    watch.watch("g", 1, process.pid)
    (one,) = watch._watched.values()
    one.cause = "stopped by a signal for 10.0 s, then killed"
    watch.report_cause(
        "g", 1, "signal 9 (SIGKILL)"
    )  # Monarch's word, before the process is seen to have ended
    assert wait_for_cause(reports)[2] == "stopped by a signal for 10.0 s, then killed"
    watch.close()
    process.kill()
    process.wait()


def test_a_process_that_goes_on_in_time_is_left_alone(
    reports: queue.Queue[tuple[str, int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "LOOK_S", 0.05)
    watch = DeathWatch(lambda *report: reports.put(report), stopped_timeout_s=1.0)
    process = subprocess.Popen(SLEEP)
    watch.watch("g", 1, process.pid)
    for _ in range(3):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.2)
    assert process.poll() is None
    assert reports.empty()
    process.kill()
    process.wait()
    watch.close()
