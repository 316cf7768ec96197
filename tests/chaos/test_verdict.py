"""Verdicts from facts. Every bad end is told from a good one, and the worst is said first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.plan import KINDS
from tests.chaos.verdict import DIFFERENCE, OPEN, PASSED, STALENESS, Seen, Verdict, judge

DIED = "error: worker actor[0] on host died: signal 9 (SIGKILL) (details: /tmp/x/run/run.log)"
GOOD = Seen(
    code=1,
    seconds=6.0,
    last_line=DIED,
    errors=f"{DIED}\n",
    early=False,
    left=[],
    rows=[],
    most_stale=None,
    sync=True,
)


def verdict(kind: str, **changed: Any) -> Verdict:
    if "last_line" in changed:
        changed.setdefault("errors", f"{changed['last_line']}\n")
    return judge(KINDS[kind], replace(GOOD, **changed))[0]


def test_an_end_with_its_cause() -> None:
    assert verdict("kill-policy") is Verdict.ENDED


def test_a_sample_of_other_weights_is_worse_than_any_end() -> None:
    assert verdict("kill-policy", other_weights="step 3: a token …") is Verdict.WRONG_VERSION


def test_the_end_of_training_is_survival_whatever_was_done() -> None:
    assert verdict("kill-rollout", code=0, last_line="trained model: x", errors="") is Verdict.SURVIVED


@pytest.mark.parametrize(
    ("kind", "line", "code"),
    [
        ("kill-critic", "error: worker critic[0] on h died: signal 9 (SIGKILL) (details: l)", 1),
        ("kill-rollout", "error: replica rollout-1: worker rollout-1[0] on h died: signal 9 (SIGKILL)", 1),
        ("kill-volume", "error: a process of the object store died: signal 9 (SIGKILL) (details: l)", 1),
        ("kill-index", "error: a process of the object store died: signal 9 (SIGKILL) (details: l)", 1),
        ("stop-reward", "error: worker reward[0] on h died: stopped by a signal for 10 s, then killed", 1),
        ("stop-volume", "error: a process of the object store died: stopped by a signal for 10 s", 1),
        ("term-controller", "ended by SIGTERM; everything of the run is closed", 143),
        ("int-controller", "interrupted; everything of the run is closed", 130),
        ("full-shm", "error: 9 bytes do not fit: … and /dev/shm has 0 left (details: l)", 1),
        ("full-disk", "error: OSError: [Errno 28] No space left on device: '/t/run/metrics.jsonl'", 1),
        ("full-disk", "error: worker actor[0] died: exit code 1; /t/run/logs: No space left on device", 1),
    ],
)
def test_causes_of_each_kind(kind: str, line: str, code: int) -> None:
    assert verdict(kind, last_line=line, code=code) is Verdict.ENDED
    assert verdict(kind, last_line="error: something else", code=code) is Verdict.UNCLEAR
    assert verdict(kind, last_line=line, code=3) is Verdict.UNCLEAR


def test_a_killed_controller_says_nothing() -> None:
    assert verdict("kill-controller", code=-9, last_line="step 2/12", errors="") is Verdict.ENDED
    assert verdict("kill-controller", code=-9, last_line="error: x") is Verdict.UNCLEAR


def test_a_traceback_on_the_terminal_is_not_one_clear_line() -> None:
    found, detail = judge(KINDS["kill-policy"], replace(GOOD, errors=f"Traceback …\n{DIED}\n"))
    assert (found, detail) == (Verdict.UNCLEAR, f"2 lines of errors, the last: {DIED}")


def test_another_groups_name_is_not_the_cause() -> None:
    assert verdict("kill-critic") is Verdict.UNCLEAR


def test_a_late_end() -> None:
    assert judge(KINDS["kill-policy"], replace(GOOD, seconds=31.0)) == (
        Verdict.LATE,
        "31.0 s after the fault",
    )


def test_a_full_disk_is_noticed_when_something_is_written() -> None:
    line = "error: OSError: [Errno 28] No space left on device: '/t/run/metrics.jsonl'"
    assert verdict("full-disk", last_line=line, seconds=31.0) is Verdict.LATE
    assert verdict("full-disk", last_line=line, seconds=31.0, early=True) is Verdict.ENDED
    assert verdict("kill-policy", seconds=31.0, early=True) is Verdict.LATE


def test_what_has_to_go_on_must() -> None:
    assert verdict("delay") is Verdict.GAVE_UP
    assert verdict("stop-controller") is Verdict.GAVE_UP


def test_the_worst_comes_first() -> None:
    wrong = {DIFFERENCE: 0.5, "step": 2}
    assert verdict("kill-policy", code=None, left=["process 1"], rows=[wrong]) is Verdict.HANG
    assert verdict("kill-policy", left=["process 1"], rows=[wrong]) is Verdict.LEFTOVER
    assert verdict("kill-policy", rows=[wrong], code=7) is Verdict.WRONG_VERSION


def test_a_fault_that_never_came_says_nothing_but_an_early_end_does() -> None:
    assert verdict("kill-policy", seconds=None, code=0) is Verdict.MISSED
    assert verdict("kill-policy", seconds=None) is Verdict.UNCLEAR


@pytest.mark.parametrize(
    ("value", "wrong"), [(9e-4, False), (1e-3, True), (float("nan"), True), (None, False)]
)
def test_sync_weights_are_the_same_on_both_sides(value: float | None, wrong: bool) -> None:
    rows = [{"step": 1, DIFFERENCE: 1e-6}, {"step": 2, DIFFERENCE: value}]
    assert (verdict("kill-policy", rows=rows) is Verdict.WRONG_VERSION) is wrong
    assert verdict("kill-policy", rows=rows, sync=False) is Verdict.ENDED


@pytest.mark.parametrize(("value", "wrong"), [(2, False), (3, True)])
def test_samples_are_not_older_than_the_run_allows(value: float, wrong: bool) -> None:
    rows = [{"step": 5, STALENESS: value}]
    found, detail = judge(KINDS["kill-policy"], replace(GOOD, rows=rows, most_stale=2.0, sync=False))
    assert (found is Verdict.WRONG_VERSION) is wrong
    assert detail == (f"step 5: {STALENESS} is 3, above 2" if wrong else "")
    assert verdict("kill-policy", rows=rows) is Verdict.ENDED, "nothing bounds it"


def test_good_bad_and_neither() -> None:
    assert PASSED.isdisjoint(OPEN)
    bad = set(Verdict) - PASSED - OPEN
    assert {one.value for one in bad} == {one.value.upper() for one in bad}
