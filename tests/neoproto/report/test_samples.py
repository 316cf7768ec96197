from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.report.reading import RunData, read_run
from neoproto.report.samples import LONGEST, chosen, sample_table, shortened
from tests.neoproto.report.runs import write_run


def runs(tmp_path: Path, questions: int = 4, answer: str = "wrong") -> list[RunData]:
    return [
        read_run(write_run(tmp_path / name, questions=questions, answer=answer), name) for name in ("a", "b")
    ]


def test_questions_are_kept_once_for_all_runs_and_steps(tmp_path: Path) -> None:
    table = sample_table(runs(tmp_path))
    assert table is not None
    assert [question[0] for question in table.questions] == ["q0", "q1", "q2", "q3"]
    assert table.labels == ("greedy",)
    assert [len(rows) for rows in table.rows] == [12, 12]
    assert table.rows[0][0] == (0, 0, 0, "wrong", 0.0, 0.0)
    assert table.rows[1][4] == (0, 3, 0, "0drow", 1.0, 1.0)


def test_beyond_the_budget_whole_questions_are_left_out(tmp_path: Path) -> None:
    table = sample_table(runs(tmp_path, questions=200), budget=20_000)
    assert table is not None
    assert table.all_questions == 200
    assert 10 < len(table.questions) < 100
    # Every step of both runs is there of each that is kept.
    assert [len(rows) for rows in table.rows] == [3 * len(table.questions)] * 2
    numbers = [int(question[0][1:]) for question in table.questions]
    assert max(numbers) - min(numbers) > 150


def test_no_samples_is_no_table(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", questions=0), "a")
    assert sample_table([run]) is None


def test_the_middle_of_a_long_text_is_left_out() -> None:
    text = "a" * LONGEST + "b" * LONGEST
    short = shortened(text)
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert "5,000 characters left out" in short
    assert shortened("a" * LONGEST) == "a" * LONGEST


@pytest.mark.parametrize(("cost", "count"), [(100, 10), (101, 9), (10_000, 1), (10**9, 1)])
def test_choice_follows_the_budget(cost: int, count: int) -> None:
    questions = [(str(number), "", "", "") for number in range(10)]
    assert len(chosen(questions, cost, 100)) == count
