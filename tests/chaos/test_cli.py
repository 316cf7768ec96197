"""The command: its table, its JSON, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import cli
from tests.chaos.harness import Result
from tests.chaos.plan import KINDS, Plan, draw
from tests.chaos.verdict import Verdict
from tests.e2e.command import ROOT


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Plan]]:
    """Results without runs; returns the plans that were played."""

    def make(*verdicts: Verdict) -> list[Plan]:
        plans: list[Plan] = []

        def play(plan: Plan, folder: Path, **options: Any) -> Result:
            plans.append(plan)
            return Result(
                plan=plan,
                verdict=verdicts[plan.index],
                fault="SIGKILL to actor[0]",
                code=1,
                seconds=6.25,
                last_line="error: worker [actor] died",
            )

        monkeypatch.setattr(cli, "play", play)
        return plans

    return make


def test_a_series_that_goes_well(
    played: Callable[..., list[Plan]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = played(Verdict.ENDED, Verdict.SURVIVED, Verdict.NOT_POSSIBLE, Verdict.MISSED)
    file = tmp_path / "out.json"
    assert cli.main(["--runs", "4", "--seed", "5", "--mode", "sync", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "error: worker [actor] died" in out
    assert "4 runs: 1 ended with its cause, 1 survived, 1 not possible here, 1 over before the fault" in out
    written = json.loads(file.read_text())
    assert written["seed"] == 5
    assert written["counts"]["survived"] == 1
    assert [row["plan"]["kind"] for row in written["results"]] == [plan.kind for plan in plans]
    assert written["results"][0]["verdict"] == "ended with its cause"
    assert written["results"][0]["seconds"] == 6.25


def test_one_bad_run_is_a_failure(played: Callable[..., list[Plan]], tmp_path: Path) -> None:
    plans = played(Verdict.SURVIVED, Verdict.LATE)
    assert cli.main(["--runs", "2", "--kind", "delay", "--keep", str(tmp_path), "a.b=1"]) == 1
    assert {plan.kind for plan in plans} == {"delay"}


def test_a_series_goes_on_where_it_was_left(played: Callable[..., list[Plan]], tmp_path: Path) -> None:
    plans = played(*[Verdict.ENDED] * 5)
    assert cli.main(["--runs", "5", "--first", "3"]) == 0
    assert plans == draw(5, 1)[3:]


@pytest.mark.parametrize(
    "words", [["--runs", "0"], ["--kind", "meteor"], ["--mode", "async"], ["--first", "20"]]
)
def test_wrong_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_the_script_says_how_it_is_used(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chaos"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(kind in done.stdout.replace("\n", " ") for kind in KINDS)
