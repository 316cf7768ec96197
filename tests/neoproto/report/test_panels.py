from __future__ import annotations

import re
from pathlib import Path

from neoproto.report.panels import PANELS, Line, lines_of, panels_of
from neoproto.report.reading import read_run
from tests.neoproto.report.runs import write_run


def test_panels_without_a_figure_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    run = read_run(folder, "a")
    keys = {panel.key for panel in panels_of([run])}
    assert {"score", "validation", "entropy", "phases", "staleness", "store_moved"} <= keys
    assert not {"kl_coefficient", "importance", "weights", "leases"} & keys
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(re.sub(r'"actor/entropy": [\d.e-]+', '"actor/entropy": null', text))
    assert "entropy" not in {panel.key for panel in panels_of([read_run(folder, "a")])}


def test_patterns_become_the_lines_that_match() -> None:
    line = Line(metric="val-core/(.*)", label="validation {}", markers=True)
    names = ["val-core/gym/spell/acc/greedy", "val-core/gym/spell/acc/mean@1", "critic/lr"]
    assert [(one.metric, one.label) for one in lines_of(line, names)] == [
        (names[0], "validation greedy"),
        (names[1], "validation mean@1"),
    ]
    names = ["val-core/gym/spell/acc/greedy", "val-core/gym/count/acc/greedy"]
    assert [one.label for one in lines_of(line, names)] == [
        "validation spell/acc/greedy",
        "validation count/acc/greedy",
    ]
    assert lines_of(Line(metric="a/b", label="b"), ["a/c"]) == []


def test_phases_have_no_validation_and_the_step_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"), "a")
    (phases,) = (panel for panel in panels_of([run]) if panel.key == "phases")
    assert [line.label for line in phases.lines] == ["step", "gen", "update_actor", "update_weights"]


def test_the_table_is_sound() -> None:
    assert len({panel.key for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel.unit, panel.key
        assert panel.title[0].isupper()
        for line in panel.lines:
            assert re.compile(line.metric).groups == line.label.count("{}"), line
