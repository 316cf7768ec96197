from __future__ import annotations

import json
from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.trainer.metrics.service_runs import TAIL_BYTES, ServiceRuns, last_logged_step


def metrics(folder: Path, *steps: int, more: str = "") -> None:
    lines = "".join(json.dumps({"step": step, "x": 1.0}) + "\n" for step in steps)
    (folder / "metrics.jsonl").write_text(lines + more)


def test_a_start_knows_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    runs = ServiceRuns(tmp_path)
    assert not runs.exists
    runs.begin(0)
    metrics(tmp_path, 0, 1, 2, 3)
    runs.begin(2)
    metrics(tmp_path, 0, 1, 2)
    runs.begin(2)  # the run was extended: nothing came after its checkpoint
    metrics(tmp_path, 0)
    runs.begin(0)  # the validation of step 0 is repeated
    said = [(one.start, one.step, one.first, one.last, one.superseded) for one in runs.starts]
    assert said == [(1, 0, None, None, 0), (2, 2, 3, 3, 1), (3, 2, None, None, 0), (4, 0, 0, 0, 1)]
    runs.keep("wandb", {"id": "a"})
    read = ServiceRuns(tmp_path)
    assert (read.starts, read.of("wandb"), read.of("mlflow")) == (runs.starts, {"id": "a"}, {})


def test_what_was_logged_before_there_was_a_service_is_not_superseded_in_it(tmp_path: Path) -> None:
    metrics(tmp_path, *range(28))
    runs = ServiceRuns(tmp_path)
    runs.begin(20)
    assert [(one.first, one.superseded) for one in runs.starts] == [(None, 0)]


def test_the_last_step_is_found_behind_a_cut_line_and_in_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_logged_step(path) is None
    metrics(tmp_path, 7, 8, more='{"step": 9, "x"')
    assert last_logged_step(path) == 8
    path.write_text('{"step": 99}\n' + " " * TAIL_BYTES + '\n{"step": 3}\n[4]\n{"step": true}\n')
    assert last_logged_step(path) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"runs": [], "starts": []}',
        '{"runs": {}, "starts": [{}]}',
        '{"runs": {}, "starts": [{"start": 1, "step": "2", "time": 3}]}',
        "[" * 5000,
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "services.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ServiceRuns(tmp_path)
    (line,) = caught.value.problems
    assert line.startswith(f"{tmp_path / 'services.json'}: cannot be read as what a run wrote (")
    assert "\n" not in line
