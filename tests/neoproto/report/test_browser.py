"""The page as a reader has it: drawn, filtered and resized in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from neoproto.report.page import html_page
from neoproto.report.reading import read_runs
from tests.neoproto.report.browser import PROGRAM, Browser, opened
from tests.neoproto.report.runs import NASTY, write_run

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium to open the page with; on Debian or Ubuntu: apt install chromium"
)
SHOWN = "[...document.querySelectorAll('#samples .card tr.pick')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Two runs: one whole and long, one killed, with gaps and with answers that are markup."""
    folder = tmp_path_factory.mktemp("report")
    killed = write_run(folder / "killed", "trainer.seed=3", answer=NASTY, nulls=True, complete=False)
    whole = write_run(folder / "whole", steps=2000, test_freq=500, questions=60)
    metrics = (killed / "metrics.jsonl").read_text()
    (killed / "metrics.jsonl").write_text(metrics[:-30])
    page = folder / "page.html"
    page.write_text(html_page(read_runs([whole, killed])), encoding="utf-8")
    with opened(page, folder / "profile") as browser:
        yield browser


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """Whatever a test does, the console stays empty and nothing is fetched."""
    yield
    assert browser.complaints == []
    assert [address for address in browser.requests if not address.startswith(("file:", "data:"))] == []


def choose(browser: Browser, element: str, value: str) -> None:
    """Set a control as a reader would."""
    browser.evaluate(
        f"(() => {{ const control = document.getElementById('{element}');"
        f"control.value = {json.dumps(value)};"
        "control.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def rows(browser: Browser) -> list[str]:
    found = browser.evaluate(f"{SHOWN}.map((row) => row.innerText)")
    assert isinstance(found, list)
    return found


def test_every_panel_is_drawn_when_it_is_scrolled_to(browser: Browser) -> None:
    assert browser.evaluate("document.querySelectorAll('.card .main-svg').length") < 40
    browser.evaluate(
        "(async () => { for (const card of document.querySelectorAll('.charts .card')) {"
        "card.scrollIntoView(); await new Promise((r) => setTimeout(r, 30)); } })()"
    )
    browser.wait_for(
        "CARDS.every((card) => card.node.querySelector('.main-svg') || card.panel.key === 'any')"
    )
    keys = browser.evaluate("CARDS.map((card) => card.panel.key)")
    assert {"score", "entropy", "kl", "lr", "grad_norm", "phases", "staleness", "store_bytes"} <= set(keys)
    assert "importance" not in keys
    for key in ("score", "phases", "staleness"):
        drawn = (
            f"document.querySelectorAll('#panel-{key} .scatterlayer .trace, #panel-{key} .barlayer .trace')"
        )
        assert browser.evaluate(f"{drawn}.length") >= 2, key


def test_samples_are_filtered_and_compared(browser: Browser) -> None:
    for name, value in (("step", ""), ("correct", ""), ("run", ""), ("text", "")):
        choose(browser, f"samples-{name}", value)
    assert browser.evaluate("document.getElementById('samples-count').innerText") == "312 of 312 samples"
    assert len(rows(browser)) == 40  # the others follow on request
    choose(browser, "samples-text", "WORD17")
    assert len(rows(browser)) == 5
    choose(browser, "samples-step", "1000")
    assert len(rows(browser)) == 1
    choose(browser, "samples-correct", "right")
    assert rows(browser) == []
    choose(browser, "samples-text", "")
    assert len(rows(browser)) == 2
    choose(browser, "samples-step", "")
    choose(browser, "samples-correct", "learned")
    assert len(rows(browser)) == 8  # one question in five steps of one run and three of the other
    browser.evaluate(f"{SHOWN}[0].click()")
    detail = browser.evaluate("document.getElementById('sample-detail').innerText")
    assert "Spell word0 backward" in detail
    assert detail.count("0drow") == 7  # what was expected, and the right answers of six later steps


def test_text_of_a_sample_stays_text(browser: Browser) -> None:
    for name, value in (("step", "0"), ("correct", "wrong"), ("run", "1"), ("text", "onerror")):
        choose(browser, f"samples-{name}", value)
    assert [NASTY in row for row in rows(browser)] == [True] * 3
    browser.evaluate(f"{SHOWN}[0].click()")
    assert NASTY in browser.evaluate("document.getElementById('sample-detail').innerText")
    assert browser.evaluate("document.querySelectorAll('main img, main b[onerror], main script').length") == 0
    assert browser.evaluate("document.title").startswith("2 runs: whole, killed")


def test_controls_redraw(browser: Browser) -> None:
    browser.evaluate("document.getElementById('learning').scrollIntoView()")
    browser.wait_for("CARDS.find((card) => card.panel.key === 'entropy').drawn")
    plot = "CARDS.find((card) => card.panel.key === 'entropy').plots[0]"
    assert browser.evaluate(f"{plot}.data.length") == 2
    assert browser.evaluate(f"{plot}.data[1].y.filter((value) => value === null).length") == 2
    choose(browser, "x-axis", "time")
    assert browser.evaluate(f"{plot}.layout.xaxis.title.text") == "minutes since the first line"
    choose(browser, "smoothing", "0.9")
    assert browser.evaluate(f"{plot}.data.length") == 4
    browser.evaluate("document.querySelectorAll('.chip')[1].click()")
    assert browser.evaluate(f"{plot}.data.length") == 2
    browser.evaluate("document.querySelectorAll('.chip')[1].click()")
    choose(browser, "smoothing", "0")
    choose(browser, "x-axis", "step")
    browser.evaluate("document.querySelector('#panel-entropy button').click()")
    assert browser.evaluate(f"{plot}.layout.yaxis.type") == "log"
    choose(browser, "panel-text", "entropy")
    assert browser.evaluate(
        "CARDS.filter((card) => card.node.offsetParent).map((card) => card.panel.key)"
    ) == ["entropy"]
    choose(browser, "panel-text", "")


def test_any_metric_can_be_drawn(browser: Browser) -> None:
    browser.evaluate("document.getElementById('panel-any').scrollIntoView()")
    browser.wait_for("CARDS.find((card) => card.panel.key === 'any').drawn")
    browser.evaluate(
        "(() => { const select = document.getElementById('any-metric'); "
        "select.value = 'training/global_step'; select.dispatchEvent(new Event('change')); })()"
    )
    assert browser.evaluate("CARDS.find((card) => card.panel.key === 'any').plots[0].data[1].y") == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_the_configuration_is_searched_and_its_differences_listed(browser: Browser) -> None:
    choose(browser, "config-text", "clip_ratio_c")
    leaves = "[...document.querySelectorAll('#config .leaf')].filter((leaf) => leaf.offsetParent)"
    assert browser.evaluate(f"{leaves}.map((leaf) => leaf.innerText)") == ["clip_ratio_c: 3.0"]
    choose(browser, "config-text", "")
    listed = browser.evaluate("document.getElementById('differences').innerText")
    assert "trainer.seed" in listed
    assert "trainer.total_training_steps" in listed
    assert "ends in a cut line" in browser.evaluate("document.getElementById('overview').innerText")
    assert (
        browser.evaluate("document.querySelectorAll('#topology .model').length") == 3
    )  # the same for both runs


@pytest.mark.parametrize("width", [360, 700, 1600])
def test_nothing_is_wider_than_the_window(browser: Browser, width: int) -> None:
    browser.size(width, 900)
    browser.wait_for(f"window.innerWidth === {width}")
    browser.wait_for("document.documentElement.scrollWidth <= window.innerWidth")
