"""The HTML page: one file with its styles, its program, plotly.js and the data, all inside.

Texts of samples, names and configurations are data, never markup: they travel as JSON in which no `<` stands,
and the program puts them into the page as text nodes only. The page's own policy forbids any request.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

from neoproto.report.panels import Panel, panels_of
from neoproto.report.reading import RunData
from neoproto.report.samples import sample_table
from neoproto.report.series import Series, drawn, points_for, series_of
from neoproto.report.summary import differences, figure_rows
from neoproto.report.topology import placement_of

SCRIPTS = ("format.js", "charts.js", "samples.js", "tables.js", "main.js")
DIGITS = 5


def html_page(runs: Sequence[RunData]) -> str:
    """The whole page of one or several runs."""
    # Only here: plotting has no place in the memory of a training run.
    from plotly.offline import get_plotlyjs

    parts = {
        "NONCE": secrets.token_urlsafe(16),
        "TITLE": escaped_html(page_title(runs)),
        "STYLE": asset("page.css"),
        "PLOTLY": get_plotlyjs(),
        "DATA": safe_json(page_data(runs)),
        "PROGRAM": "\n".join(asset(name) for name in SCRIPTS),
    }
    # In one pass: what a part contains is not looked at again.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def page_title(runs: Sequence[RunData]) -> str:
    """Project and experiment of a run; the number of several."""
    if len(runs) > 1:
        return f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    trainer = runs[0].config.get("trainer")
    names = (
        [trainer.get(key) for key in ("project_name", "experiment_name")] if isinstance(trainer, dict) else []
    )
    return " / ".join(str(name) for name in names if name) or runs[0].name


def page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything that the page shows, ready for JSON."""
    panels = panels_of(runs)
    samples = sample_table(runs)
    axes = Axes()
    return {
        "title": page_title(runs),
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "runs": [run_data(run) for run in runs],
        "panels": [panel_data(panel, runs, axes) for panel in panels],
        "metrics": metric_data(runs, axes),
        "axes": axes.lists,
        "figures": figure_rows(runs),
        "differences": differences(runs) if len(runs) > 1 else [],
        "samples": None
        if samples is None
        else {name: getattr(samples, name) for name in type(samples).__dataclass_fields__},
    }


def run_data(run: RunData) -> dict[str, Any]:
    """A run without its curves."""
    trainer = run.config.get("trainer")
    wanted = trainer.get("total_training_steps") if isinstance(trainer, dict) else None
    notes = list(run.notes)
    if not run.curves:
        notes.insert(0, "no step has finished yet")
    return {
        "name": run.name,
        "folder": str(run.folder.absolute()),
        "complete": run.complete,
        "last_step": run.last_step,
        "wanted_steps": wanted,
        "notes": notes,
        "config": as_texts(run.config),
        "topology": placement_of(run.config),
        "times": [list(run.seconds), list(run.seconds.values())],
    }


class Axes:
    """Lists of steps, each kept once: most curves have the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    @property
    def lists(self) -> list[tuple[int, ...]]:
        return list(self._known)

    def number(self, steps: tuple[int, ...]) -> int:
        return self._known.setdefault(steps, len(self._known))


def panel_data(panel: Panel, runs: Sequence[RunData], axes: Axes) -> dict[str, Any]:
    """A panel and its curves: run, line, axis, values, and a band's lower and upper edge.

    `zero`: they are 0 throughout, and the panel is drawn on request.
    """
    curves, most = [], points_for(len(runs))
    for run_number, run in enumerate(runs):
        for line_number, line in enumerate(panel.lines):
            series = series_of(run, line, panel.kind, most)
            if series is None:
                continue
            curve: dict[str, Any] = {"run": run_number, "line": line_number} | points(series, axes)
            edges = [run.curves.get(name) for name in line.band or ()]
            if edges and all(edges):
                curve["band"] = [
                    points(edge, axes)
                    for edge in (drawn(one, panel.kind, line.scale, most) for one in edges if one)
                    if edge is not None
                ]
            curves.append(curve)
    return {
        "key": panel.key,
        "section": panel.section,
        "title": panel.title,
        "unit": panel.unit,
        "help": panel.help,
        "stacked": panel.kind == "stacked",
        "log": panel.log,
        "zero": is_zero([one for curve in curves for one in (curve, *curve.get("band", []))]),
        "lines": [
            {"label": line.label, "markers": line.markers, "metric": line.metric} for line in panel.lines
        ],
        "curves": curves,
    }


def is_zero(curves: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all that can be drawn is 0."""
    values = [value for curve in curves for value in curve["y"] if math.isfinite(value)]
    return bool(values) and not any(values)


def metric_data(runs: Sequence[RunData], axes: Axes) -> dict[str, list[Any]]:
    """Every metric of every run, for the panel that shows any of them; null where a run lacks it."""
    names = sorted({name for run in runs for name in run.curves})
    table, most = {}, points_for(len(runs))
    for name in names:
        found = [drawn(run.curves[name], most=most) if name in run.curves else None for run in runs]
        if any(found):
            table[name] = [None if series is None else points(series, axes) for series in found]
    return table


def points(series: Series, axes: Axes) -> dict[str, Any]:
    """A series for JSON."""
    return {"axis": axes.number(series.steps), "y": list(series.values)}


def safe_json(tree: Any) -> str:
    """JSON that can stand inside a script element: no `<`, no `&`, no NaN; numbers are rounded."""
    text = json.dumps(rounded(tree), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def rounded(tree: Any) -> Any:
    """Floats with few digits, those that are not finite as null."""
    if isinstance(tree, float):
        if not math.isfinite(tree):
            return None
        short = float(f"{tree:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(tree, dict):
        return {str(key): rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [rounded(value) for value in tree]
    return tree


def as_texts(tree: Any) -> Any:
    """A configuration with its values as they are written in YAML, so that none is rounded."""
    if isinstance(tree, Mapping):
        return {str(key): as_texts(value) for key, value in tree.items()}
    return tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)


def escaped_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def asset(name: str) -> str:
    return (files("neoproto.report") / "assets" / name).read_text(encoding="utf-8")
