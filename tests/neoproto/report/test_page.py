from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from neoproto.report.page import asset, html_page, page_data, rounded, safe_json
from neoproto.report.reading import read_run, read_runs
from tests.neoproto.report.runs import NASTY, write_run


class Elements(HTMLParser):
    """Start tags of a page, and what the data element holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = ("id", "data") in attrs
        for name, value in attrs:
            assert not (name in ("src", "href") and value and not value.startswith("data:")), (tag, value)

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def parsed(page: str) -> tuple[Elements, dict[str, Any]]:
    elements = Elements()
    # The program and plotly.js are long and known.
    elements.feed(re.sub(r"(<script nonce=[^>]*>).*?</script>", r"\1</script>", page, flags=re.DOTALL))
    return elements, json.loads(elements.data)


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    page = html_page([read_run(write_run(tmp_path / "a"), "a")])
    elements, data = parsed(page)
    assert elements.tags.count("script") == 3
    assert "default-src 'none'" in page
    assert "{{" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert data["title"] == "neoproto / ppo"
    assert len(page) < 8e6


@pytest.mark.parametrize("where", ["answer", "name", "config"])
def test_texts_of_a_run_are_never_markup(tmp_path: Path, where: str) -> None:
    answer = NASTY if where == "answer" else "wrong"
    folder = write_run(tmp_path / "a", answer=answer)
    if where == "config":
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(
            text.replace("experiment_name: ppo", f"experiment_name: {json.dumps(NASTY)}")
        )
    name = NASTY if where == "name" else "a"
    plain, _ = parsed(html_page([read_run(write_run(tmp_path / "b"), "b")]))
    elements, data = parsed(html_page([read_run(folder, name)]))
    assert elements.tags == plain.tags
    found = {
        "answer": data["samples"]["rows"][0][0][3],
        "name": data["runs"][0]["name"],
        "config": data["runs"][0]["config"]["trainer"]["experiment_name"],
    }
    assert found[where] == NASTY


def test_data_cannot_end_its_element() -> None:
    text = safe_json({NASTY: [NASTY]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {NASTY: [NASTY]}


def test_nothing_in_a_part_is_taken_for_a_place_of_another(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", answer="{{PROGRAM}}{{DATA}}")
    _, data = parsed(html_page([read_run(folder, "a")]))
    assert data["samples"]["rows"][0][0][3] == "{{PROGRAM}}{{DATA}}"


def test_the_program_makes_no_markup_from_text() -> None:
    for name in ("format.js", "charts.js", "samples.js", "tables.js", "main.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", asset(name)), (
            name
        )


def test_curves_of_several_runs_share_panels_and_axes(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=9, seed=1)])
    data = page_data(runs)
    (entropy,) = (panel for panel in data["panels"] if panel["key"] == "entropy")
    assert [curve["run"] for curve in entropy["curves"]] == [0, 1]
    assert [len(data["axes"][curve["axis"]]) for curve in entropy["curves"]] == [6, 9]
    assert len(data["axes"]) == len(set(data["axes"]))
    (length,) = (panel for panel in data["panels"] if panel["key"] == "response_length")
    assert len(length["curves"][0]["band"]) == 2
    assert [row["key"] for row in data["differences"]] == ["trainer.total_training_steps"]
    assert set(data["metrics"]) >= {"actor/entropy", "training/global_step"}


def test_a_panel_is_zero_only_if_all_that_is_drawn_of_it_is(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")])

    def zero(key: str) -> bool:
        return next(one["zero"] for one in page_data(runs)["panels"] if one["key"] == key)

    staleness = runs[0].curves["training/off_policy/trajectory_staleness/mean"]
    judged = runs[1].curves["reward/errors"]
    assert isinstance(staleness, dict)
    assert isinstance(judged, dict)
    assert zero("judge")
    for run in runs:
        run.curves["training/off_policy/trajectory_staleness/mean"].update(dict.fromkeys(staleness, 0.0))  # type: ignore[attr-defined]
    assert not zero("staleness")  # its shade is not
    judged[3] = 1.0  # one answer, of one run
    assert not zero("judge")


def test_thousands_of_steps_stay_small(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=5000, test_freq=100, questions=300), "a")
    assert len(safe_json(page_data([run]))) < 3e6


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", complete=False)
    (folder / "metrics.jsonl").write_text("")
    for path in (folder / "validation").iterdir():
        path.unlink()
    _, data = parsed(html_page([read_run(folder, "a")]))
    assert data["panels"] == []
    assert data["samples"] is None
    assert data["runs"][0]["notes"] == ["no step has finished yet"]


def test_numbers_are_short_and_not_finite_ones_are_null() -> None:
    assert rounded([1.23456789, 1e-9, math.nan, math.inf, 3.0, 7, True, "x"]) == [
        1.2346, 1e-9, None, None, 3, 7, True, "x",
    ]  # fmt: skip
