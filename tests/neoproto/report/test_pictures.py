from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.report.panels import panels_of
from neoproto.report.pictures import legend_of, write_pictures
from neoproto.report.reading import read_runs
from tests.neoproto.report.runs import write_rows, write_run


def test_the_main_curves_become_png_files(tmp_path: Path) -> None:
    runs = read_runs(
        [write_run(tmp_path / "a", nulls=True), write_run(tmp_path / "$x_$ {b}", steps=1, complete=False)]
    )
    paths = write_pictures(runs, tmp_path / "pictures" / "here")
    assert {"score.png", "phases.png", "staleness.png"} <= {path.name for path in paths}
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 3_000 < path.stat().st_size < 200_000


def test_one_run_and_strange_names(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "_a")
    text = (folder / "metrics.jsonl").read_text().replace("acc/greedy", "acc/_$\\\\frac{$greedy")
    (folder / "metrics.jsonl").write_text(text)
    assert write_pictures(read_runs([folder]), tmp_path / "p")


def test_many_runs_fit(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / f"run{number}", steps=2) for number in range(7)])
    assert len(write_pictures(runs, tmp_path / "p")) > 10


def test_a_legend_names_each_run_and_each_line_once(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / name) for name in ("a", "b")])
    panels = {panel.key: panel for panel in panels_of(runs)}
    named = [handle.get_label() for handle in legend_of(panels["score"], runs)]
    assert named == ["a", "b", "training", "validation greedy", "validation mean@1"]
    assert [handle.get_label() for handle in legend_of(panels["entropy"], runs)] == ["a", "b"]


def test_values_that_cannot_be_drawn_leave_an_empty_picture(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    rows = [{"step": step, "timing_s/step": 1e200, "actor/entropy": 1e200} for step in (1, 2)]
    write_rows(folder / "metrics.jsonl", rows)
    for runs in ([folder], [folder, folder]):
        assert len(write_pictures(read_runs(runs), tmp_path / "p")) == 2


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: cannot be written to"):
        write_pictures(read_runs([write_run(tmp_path / "a")]), tmp_path / "file")
