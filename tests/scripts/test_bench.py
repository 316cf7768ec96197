"""The benchmarks' report, which comes however they end, and the runs that they start."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts' modules, imported as a script imports its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import _bench
        import _runs
        import bench_main
        import bench_modes

        yield SimpleNamespace(bench=_bench, runs=_runs, main=bench_main, modes=bench_modes)
    finally:
        sys.path.remove(str(SCRIPTS))


def ended(capsys: pytest.CaptureFixture[str], body: Callable[[], None]) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON of the last line, and what stands on the standard error."""
    code: Any = 0
    try:
        body()
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, json.loads(captured.out.splitlines()[-1]), captured.err


def test_everything_measured_is_a_report_without_problems(
    scripts: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        with scripts.bench.Measurements("x", 3) as measured:
            found: list[int] = []
            assert measured.repeat(3, found.append) == 3
            measured.add([scripts.bench.Figure(name="a", value=sum(found), unit="s", goal="<= 3")])

    code, told, errors = ended(capsys, body)
    assert (code, errors, told["problems"], told["repeats"]) == (0, "", [], 3)
    assert told["figures"] == [
        {
            "name": "a",
            "value": 3,
            "unit": "s",
            "goal": "<= 3",
            "detail": {},
            "incomplete": None,
            "holds": True,
        }
    ]


@pytest.mark.parametrize(
    ("failure", "code", "problem"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted by SIGINT"),
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "interrupted by SIGTERM"),
        (lambda: 1 / 0, 1, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit("no"), 1, "SystemExit: no"),
    ],
)
@pytest.mark.parametrize("when", [0, 2])
def test_what_was_measured_is_reported_after_a_failure_or_an_interruption(
    scripts: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    failure: Callable[[], object],
    code: int,
    problem: str,
    when: int,
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def body() -> None:
        with scripts.bench.Measurements("x", 5) as measured:
            measured.add([scripts.bench.Figure(name="before", value=1.0, unit="s")])
            times: dict[str, list[int]] = {"a": [], "b": []}

            def turn(number: int) -> None:
                times["a"].append(number)
                if number == when:
                    failure()
                times["b"].append(number)

            whole = scripts.bench.first_of(measured.repeat(5, turn), times)
            measured.add(scripts.bench.Figure(name=name, value=len(whole[name]), unit="") for name in whole)
            raise AssertionError("what ended the turns is raised here")

    found, told, errors = ended(capsys, body)
    assert (found, told["problems"]) == (code, [problem])
    assert f"error: {problem}\n" in errors
    assert "AssertionError" not in errors
    # A turn that was the first leaves nothing; a half one is left out.
    marked = [(one["name"], one["value"], one["incomplete"]) for one in told["figures"]]
    assert marked == [("before", 1.0, None), *((name, 2, "2 of 5 turns") for name in "ab" if when)]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_figures_of_a_generator_that_fails_are_kept_and_others_are_tried(
    scripts: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = scripts.bench.Figure

    def some() -> Iterator[Any]:
        yield figure(name="first", value=1.0, unit="s")
        yield figure(name="second", value=max([], key=len), unit="s")

    def body() -> None:
        with scripts.bench.Measurements("x", 1) as measured:
            measured.attempt("some", some)
            measured.attempt("others", lambda: [figure(name="third", value=3.0, unit="s")])

    code, told, errors = ended(capsys, body)
    assert (code, [one["name"] for one in told["figures"]]) == (1, ["first", "third"])
    assert told["problems"][0].startswith("some cannot be worked out (ValueError: ")
    assert "Traceback" not in errors


def test_counts_are_whole_and_above_nought(scripts: SimpleNamespace) -> None:
    import argparse

    assert scripts.bench.positive("3") == 3
    for text in ("0", "-1", "1.5", "many"):
        with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
            scripts.bench.positive(text)


def clock(sleep: Callable[[float], None]) -> SimpleNamespace:
    return SimpleNamespace(sleep=sleep, time=time.time, perf_counter=time.perf_counter)


def command(path: Path, body: str) -> str:
    """A program in place of the interpreter that a run is started with."""
    path.write_text(
        "#!/bin/sh\nfor word; do case $word in runtime.run_dir=*) folder=${word#*=};; esac; done\n" + body
    )
    path.chmod(0o755)
    return str(path)


def test_memory_that_was_not_measured_is_not_told(
    scripts: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = command(tmp_path / "run", """mkdir "$folder"; echo '{"step": 1}' > "$folder/metrics.jsonl"\n""")
    monkeypatch.setattr(scripts.runs.sys, "executable", program)
    monkeypatch.setattr(scripts.runs, "time", clock(lambda _: None))
    done = scripts.runs.run(tmp_path / "a", tmp_path, measure_memory=False)
    assert (done.peak_pss_gib, done.rows) == (None, [{"step": 1}])
    assert "PSS" not in capsys.readouterr().out
    assert scripts.runs.run(tmp_path / "b", tmp_path).peak_pss_gib is not None
    assert "peak PSS" in capsys.readouterr().out
    # The run of another time would be resumed, and its rows be taken for new ones.
    with pytest.raises(scripts.bench.BenchError, match="a is there already"):
        scripts.runs.run(tmp_path / "a", tmp_path)


def test_a_run_that_fails_is_told_and_one_that_is_interrupted_is_ended(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.runs.sys, "executable", command(tmp_path / "bad", "echo no memory; exit 3\n"))
    with pytest.raises(scripts.bench.BenchError, match="failed with code 3:\nno memory"):
        scripts.runs.run(tmp_path / "a", tmp_path)
    pid = tmp_path / "pid"
    slow = command(tmp_path / "slow", f"echo $$ > {pid}; exec sleep 600\n")
    monkeypatch.setattr(scripts.runs.sys, "executable", slow)

    def interrupt(_: float) -> None:
        if pid.exists() and pid.read_text().strip():
            raise KeyboardInterrupt

    monkeypatch.setattr(scripts.runs, "time", clock(interrupt))
    with pytest.raises(KeyboardInterrupt):
        scripts.runs.run(tmp_path / "b", tmp_path, measure_memory=False)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_modes_that_were_measured_are_told_without_the_others(
    scripts: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps, no validation, and the third run fails."""
    rows = [
        {"actor/pg_loss": 0.0, "time": 10.0 * step, "timing_s/step": 1.0, "timing_s/update_weights": 0.5}
        for step in (1, 2)
    ]

    def run(folder: Path, *_: Any, **__: Any) -> Any:
        if folder.name.startswith("sync"):
            raise scripts.bench.BenchError("sync_1: the run failed with code 1:\n…")
        return scripts.runs.Run(started=0.0, seconds=30.0, peak_pss_gib=None, rows=rows)

    monkeypatch.setattr(scripts.modes, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_modes.py", "--seeds", "1"])
    code, told, _ = ended(capsys, scripts.modes.main)
    assert code == 1
    values = {one["name"]: (one["value"], one["incomplete"]) for one in told["figures"]}
    assert values["weight_seconds_a_step_separate_async"] == (0.5, "2 of 3 turns")
    assert values["weight_work_decoupled_vs_separate"] == (1.0, "2 of 3 turns")
    assert [text.split(" cannot")[0] for text in told["problems"][:-1]] == [
        "what was learned",
        "wall time",
        "staleness",
    ]
    assert told["problems"][-1].startswith("sync_1: the run failed")
