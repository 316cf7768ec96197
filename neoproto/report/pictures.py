"""The main curves as PNG files.

Drawn by matplotlib, which the stack has anyway (reasoning-gym needs it); plotly's way would start a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from neoproto.errors import ConfigError
from neoproto.report.panels import Panel, panels_of
from neoproto.report.reading import RunData
from neoproto.report.series import drawn, series_of

COLOURS = ("#2563eb", "#e07b00", "#15803d", "#b3266e", "#7c3aed", "#0e7490", "#8a6d1d", "#64748b")
STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
INCHES, DPI = (6.4, 3.6), 110
MOST_COLUMNS = 3


def write_pictures(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write `{panel}.png` for each of the main panels that the runs have; returns their paths.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [write_picture(panel, runs, folder) for panel in panels_of(runs) if panel.picture]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {error.strerror or error}") from error


def write_picture(panel: Panel, runs: Sequence[RunData], folder: Path) -> Path:
    """One panel as a PNG file."""
    columns = min(len(runs), MOST_COLUMNS) if panel.kind == "stacked" else 1
    rows = -(-len(runs) // columns) if panel.kind == "stacked" else 1
    width, height = INCHES
    size = (width * (1 + columns) / 2, height * (1 + rows) / 2)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    cells = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    if panel.kind == "stacked":
        for axes, run in zip(cells, runs, strict=False):
            draw_stacked(axes, panel, run)
            axes.set(xlabel=literal(run.name) if len(runs) > 1 else "step", ylabel=panel.unit)
        for axes in cells[len(runs) :]:
            axes.set_axis_off()
        # Below the charts, once: in one of them it would hide what it explains.
        named = {
            label: handle
            for axes in cells
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        legend_below(figure, [*named.values()], [*named], 5 if columns > 1 else 4)
    else:
        draw_lines(cells[0], panel, runs)
        cells[0].set(xlabel="step", ylabel=panel.unit, yscale="log" if panel.log else "linear")
        if len(runs) > 1:
            handles = legend_of(panel, runs)
            # Below the chart: runs have long names, which would hide the curves.
            legend_below(figure, handles, [str(handle.get_label()) for handle in handles], 3)
    figure.suptitle(panel.title, fontsize=11)
    path = folder / f"{panel.key}.png"
    figure.savefig(path, format="png")
    return path


def draw_lines(axes: Axes, panel: Panel, runs: Sequence[RunData]) -> None:
    """Colours tell runs apart, or the lines of a single one; styles the lines of several."""
    several = len(runs) > 1
    for run_number, run in enumerate(runs):
        for number, line in enumerate(panel.lines):
            series = series_of(run, line, panel.kind)
            if series is None:
                continue
            dots = line.markers or len(series.steps) < 4
            colour = COLOURS[(run_number if several else number) % len(COLOURS)]
            axes.plot(
                series.steps,
                series.values,
                STYLES[number % len(STYLES)] if several else "-",
                color=colour,
                label=literal(line.label),
                linewidth=1.4,
                marker="o" if dots else None,
                markersize=4,
            )
            edges = [run.curves.get(metric) for metric in line.band or ()]
            low, high = (
                [drawn(edge) for edge in edges if edge]
                if edges and all(edges) and not several
                else (None, None)
            )
            if low is not None and high is not None and low.steps == high.steps:
                axes.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.12, linewidth=0)
    axes.grid(alpha=0.3)
    if not several and len(panel.lines) > 1:
        axes.legend(fontsize=8 if len(axes.lines) <= 8 else 6, frameon=False, ncols=1 + len(axes.lines) // 9)


def legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int) -> None:
    """Outside the charts, in so many columns at most."""
    if not labels:  # nothing could be drawn: every value is too great, say
        return
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), columns),
        fontsize=8,
        frameon=False,
        handlelength=3,
    )


def legend_of(panel: Panel, runs: Sequence[RunData]) -> list[Line2D]:
    """What the colours are, the runs, and what the styles are, the lines of each if there are several."""
    drawn_runs = [
        Line2D([], [], color=COLOURS[number % len(COLOURS)], label=literal(run.name))
        for number, run in enumerate(runs)
        if any(series_of(run, line, panel.kind) is not None for line in panel.lines)
    ]
    styles = [
        Line2D(
            [],
            [],
            color="#52606d",
            linestyle=STYLES[number % len(STYLES)],
            marker="o" if line.markers else None,
            markersize=4,
            label=literal(line.label),
        )
        for number, line in enumerate(panel.lines)
        if any(series_of(run, line, panel.kind) is not None for run in runs)
    ]
    return drawn_runs + (styles if len(styles) > 1 else [])


def draw_stacked(axes: Axes, panel: Panel, run: RunData) -> None:
    """Phases on top of each other, the whole step as a line."""
    found = [(line, series_of(run, line, panel.kind)) for line in panel.lines]
    phases = [(line.label, series) for line, series in found if series is not None and line.label != "step"]
    steps = sorted({step for _, series in phases for step in series.steps})
    values = [
        [by_step.get(step, 0.0) for step in steps]
        for by_step in (dict(zip(series.steps, series.values, strict=True)) for _, series in phases)
    ]
    if phases:
        axes.stackplot(steps, values, labels=[label for label, _ in phases], colors=COLOURS, alpha=0.8)
    for line, series in found:
        if series is not None and line.label == "step":
            axes.plot(series.steps, series.values, color="#1f2933", linewidth=1.2, label="whole step")
    axes.grid(alpha=0.3)


def literal(text: str) -> str:
    """For matplotlib, which reads `$…$` as a formula and hides labels that begin with an underscore."""
    return text.replace("$", r"\$").lstrip("_") or "run"
