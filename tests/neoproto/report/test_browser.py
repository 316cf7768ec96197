"""The page as a reader has it: drawn, filtered and resized in a real browser."""

from __future__ import annotations

import json
import re
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
        "CARDS.every((card) => card.node.querySelector('.main-svg')"
        " || card.panel.zero || card.panel.key === 'any')"
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


def draw_all(browser: Browser) -> None:
    browser.evaluate("CARDS.filter((card) => !card.node.classList.contains('zero')).forEach(draw)")


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_a_chart_has_room_for_its_curves(browser: Browser, width: int) -> None:
    """Of two runs, with legends and texts of several lines beside it."""
    browser.size(width, 900)
    browser.wait_for(f"window.innerWidth === {width}")
    draw_all(browser)
    browser.wait_for("document.querySelector('#panel-score .plot')._fullLayout.width < window.innerWidth")
    heights = browser.evaluate(
        "Object.fromEntries(CARDS.filter((card) => card.node.offsetParent).map((card) =>"
        " [card.panel.key, Math.min(...card.plots.map((plot) => plot._fullLayout._size.h))]))"
    )
    assert len(heights) > 15
    assert {key: height for key, height in heights.items() if height < 170} == {}
    # The line's names are beside the chart, each once, and can be switched off.
    assert browser.evaluate(
        "[...document.querySelectorAll('#panel-score .legend button')].map((one) => one.innerText)"
    ) == ["training", "validation greedy", "validation mean@1"]
    plot = "document.querySelector('#panel-score .plot')"
    before = browser.evaluate(f"{plot}.data.length")
    click = "document.querySelectorAll('#panel-score .legend button')[1].click()"
    browser.evaluate(click)
    assert browser.evaluate(f"{plot}.data.length") == before - 2
    browser.evaluate(click)
    assert browser.evaluate(f"{plot}.data.length") == before


def test_tools_of_a_chart_are_hidden_until_it_is_pointed_at(browser: Browser) -> None:
    draw_all(browser)
    bars = "[...document.querySelectorAll('.modebar')].map((bar) => getComputedStyle(bar).opacity)"
    assert set(browser.evaluate(bars)) == {"0"}


def test_panels_that_are_nought_throughout_are_named_and_drawn_on_request(browser: Browser) -> None:
    shown = "CARDS.filter((card) => card.node.offsetParent).map((card) => card.panel.key)"
    named = "[...document.querySelectorAll('.zeros button')]"
    assert "judge" not in browser.evaluate(shown)
    assert "Answers that a judge failed on" in browser.evaluate(f"{named}.map((one) => one.innerText)")
    choose(browser, "panel-text", "judge")
    assert browser.evaluate(shown) == ["judge"]
    choose(browser, "panel-text", "")
    assert "judge" not in browser.evaluate(shown)
    browser.evaluate(f"{named}.find((one) => one.innerText.startsWith('Answers')).click()")
    assert "judge" in browser.evaluate(shown)


def test_every_run_is_in_sight_in_a_narrow_window(browser: Browser) -> None:
    browser.size(390, 844)
    browser.wait_for("window.innerWidth === 390")
    rows = browser.evaluate(
        "[...document.querySelectorAll('.runs tbody tr')].map((row) => [...row.cells].slice(1)"
        ".map((cell) => [cell.getBoundingClientRect().right <= window.innerWidth,"
        " cell.innerText.trim() !== '', cell.querySelector('.dot').offsetWidth > 0]))"
    )
    assert len(rows) > 10
    assert rows == [[[True, True, True]] * 2] * len(rows)
    text = browser.evaluate("document.getElementById('overview').innerText")
    assert text.count(" → ") == 4  # two runs, two ways of drawing
    # The list of samples needs no scrolling to the side.
    assert browser.evaluate(
        "[...document.querySelectorAll('#samples .scroll')]"
        ".every((one) => one.scrollWidth <= one.clientWidth)"
    )


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`; WCAG 2.1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_light_and_dark_are_as_the_reader_has_set_them(browser: Browser) -> None:
    draw_all(browser)
    looks = {}
    for theme, curve in (("dark", "#6ea8fe"), ("light", "#2563eb")):
        browser.prefer(theme)
        browser.wait_for(f"document.querySelector('#panel-entropy .plot').data[0].line.color === '{curve}'")
        looks[theme] = browser.evaluate(
            "(() => { const of = (query, what) => getComputedStyle(document.querySelector(query))[what];"
            "return { card: of('.card', 'backgroundColor'), ink: of('h1', 'color'),"
            " soft: of('.help', 'color'), link: of('nav a', 'color'),"
            " dot: of('.chip .dot', 'backgroundColor') }; })()"
        )
        card = luminance(looks[theme]["card"])
        for name in ("ink", "soft", "link"):
            low, high = sorted((card, luminance(looks[theme][name])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (theme, name)
    assert luminance(looks["dark"]["card"]) < 0.05 < 0.9 < luminance(looks["light"]["card"])
    assert looks["dark"]["dot"] == "rgb(110, 168, 254)"


@pytest.mark.parametrize("width", [360, 700, 1600])
def test_nothing_is_wider_than_the_window(browser: Browser, width: int) -> None:
    browser.size(width, 900)
    browser.wait_for(f"window.innerWidth === {width}")
    browser.wait_for("document.documentElement.scrollWidth <= window.innerWidth")
