"""Data types of plots, and functions that draw them on figures of matplotlib.

Elements that differ in color also differ in hatching, marker or label.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from odc_mpi.report.svg import INK, MUTED, PAPER, WIDTH
from odc_mpi.simulate.events import merge_intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Color of text on bars, which differs from `PAPER` so that dark mode does not replace it.
_ON_COLOR = "#fffffe"
#: Width in pixels of a digit at the font size of notes.
_DIGIT = 7.0


class Style(NamedTuple):
    """Color and hatch ("/", "-", a backslash or "") of a bar. With the color "none" it has an outline and the hatch."""

    color: str
    hatch: str = ""


class GanttRow(NamedTuple):
    """Timeline of one rank, with `label` to its left. `spans` maps kinds of activity to start and end times in seconds.

    A note consists of a start time, an end time and a label. A line marks the start, and the label is drawn if it fits.
    """

    label: str
    spans: Mapping[str, Sequence[Sequence[float]]]
    notes: Sequence[tuple[float, float, str]] = ()


class GanttChart(NamedTuple):
    """Gantt chart with the timelines of several ranks, and times in seconds to mark with a line and a label."""

    heading: str
    rows: Sequence[GanttRow]
    end_s: float
    marks: Sequence[tuple[float, str]] = ()


class BarPanel(NamedTuple):
    """Panel with a bar for each label, with a format specification for their values.

    A vertical line is drawn at `line` unless it is None. Bars may have lower and upper quartiles. `references` are
    values from another source, keyed by source and label.
    """

    heading: str
    values: Mapping[str, float]
    form: str
    line: float | None = None
    quartiles: Mapping[str, Sequence[float]] = MappingProxyType({})
    references: Mapping[str, Mapping[str, float]] = MappingProxyType({})


class Curve(NamedTuple):
    """Curve in a panel. It appears in the legend unless its label is "". Missing values are NaN.

    `style` contains the color, the dashes (linestyle) and the marker, in the notation of ``Axes.plot``.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Mapping[str, Any]


class Panel(NamedTuple):
    """Panel of a plot, `height` pixels high, with one or more curves.

    `form` is "log" for a logarithmic y axis, a format specification for a y axis that includes 0, or "" otherwise.
    """

    heading: str
    curves: Sequence[Curve]
    form: str = ""
    height: float = 210.0


class Histogram(NamedTuple):
    """Histogram of token counts with bin edges in tokens. `mark` is a position, in tokens, and the label of a line."""

    heading: str
    edges: Sequence[float]
    counts: Sequence[float]
    color: str
    mark: tuple[float, str]


#: Maximum number of ranks in a plot, so that a reader can distinguish the rows.
MAX_RANKS = 32


def choose_ranks(busy_s: Sequence[float]) -> list[int]:
    """Return all ranks, or `MAX_RANKS` ranks evenly spaced from least to most busy, in ascending order of rank."""
    count = len(busy_s)
    if count <= MAX_RANKS:
        return list(range(count))
    by_work = sorted(range(count), key=busy_s.__getitem__)
    return sorted({by_work[i * (count - 1) // (MAX_RANKS - 1)] for i in range(MAX_RANKS)})


def _fill(style: Style) -> dict[str, Any]:
    """Return the settings of a bar. Its edges have the color of the hatch, but no width unless they are an outline."""
    is_outline = style.color == "none"
    edge = {"edgecolor": MUTED, "linewidth": 0.5} if is_outline else {"edgecolor": PAPER, "linewidth": 0.0}
    return {"facecolor": style.color, "hatch": 2 * style.hatch, **edge}


def _mark(axes: "Axes", at: float, text: str) -> None:
    """Draw a vertical line at an x value, with `text` above the axes, to the left of the line if it is far right."""
    axes.axvline(at, color=INK)
    left, right = axes.get_xlim()
    is_right = at > left + 0.9 * (right - left)
    axes.text(at, 1.0, text, transform=axes.get_xaxis_transform(), ha="right" if is_right else "left", va="bottom")


def gantt(figure: "Figure", charts: Sequence[GanttChart], styles: Mapping[str, Style]) -> float:
    """Draw Gantt charts one below the other. `styles` maps each kind of span to its style, in drawing order."""
    end_s = max(chart.end_s for chart in charts)
    rows = [len(chart.rows) for chart in charts]
    grid = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=rows)
    handles: dict[str, Any] = {}
    for chart, axes in zip(charts, grid[:, 0], strict=True):
        axes.set_title(chart.heading, pad=20 if chart.marks else 6)
        axes.set_xlim(0, end_s)
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)
        axes.set_yticks(range(len(chart.rows)), [row.label for row in chart.rows], color=INK)
        axes.grid(False)
        for number, row in enumerate(chart.rows):
            handles = _draw_row(axes, number, row, styles, end_s / WIDTH) | handles
        for at, text in chart.marks:
            _mark(axes, at, text)
    grid[-1, 0].set_xlabel("seconds", loc="right")
    used = [kind for kind in styles if kind in handles]
    figure.legend([handles[kind] for kind in used], used, loc="outside lower left", ncols=min(6, len(used)))
    return 24 * sum(rows) + 46 * len(charts) + 70


def _draw_row(axes: "Axes", number: int, row: GanttRow, styles: Mapping[str, Style], pixel_s: float) -> dict[str, Any]:
    """Draw a timeline at the height `number`, and return the elements for the legend, keyed by kind of span."""
    handles = {}
    for kind, style in styles.items():
        # Gaps below half a pixel, and spans below a tenth of a pixel, are invisible. Each element costs 0.2 ms.
        merged = merge_intervals(sorted((a, b) for a, b in row.spans.get(kind, ())), pixel_s / 2)
        spans = [(a, b - a) for a, b in merged if b - a > 0.1 * pixel_s]
        if spans:
            handles[kind] = axes.broken_barh(spans, (number - 0.4, 0.8), **_fill(style))
    starts = [began for began, ended, _ in row.notes if ended - began > 3 * pixel_s]
    axes.vlines(starts, number - 0.4, number + 0.4, color=PAPER, linewidth=1)
    box = _box(next(iter(styles.values())).color)
    for began, ended, text in row.notes:
        if ended - began > _DIGIT * (len(text) + 1) * pixel_s:
            place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "bbox": box}
            axes.text((began + ended) / 2, number, text, color=_ON_COLOR, fontsize=11, **place)
    return handles


def bars(figure: "Figure", panels: Sequence[BarPanel], styles: Mapping[str, Style]) -> float:
    """Draw panels of bars side by side. `styles` maps the label of each bar to its style, from top to bottom."""
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    rows = {label: row for row, label in enumerate(styles)}
    for panel, axes in zip(panels, grid[0], strict=True):
        axes.set_title(panel.heading)
        axes.grid(False)
        axes.set_yticks(range(len(rows)), list(rows), color=INK)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        for label, row in rows.items():
            axes.barh(row, panel.values[label], height=0.6, **_fill(styles[label]))
        for label, quartiles in panel.quartiles.items():
            axes.plot(quartiles, [rows[label]] * 2, "|-", color=INK)
        for source, values in panel.references.items():
            axes.plot(list(values.values()), [rows[label] for label in values], "D", color=INK, label=source)
            axes.legend(loc="upper left", bbox_to_anchor=(0, -30 / (27 * len(rows))))
        axes.set_xlim(0, 1.25 * axes.dataLim.xmax or 1)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(f"{{x:{panel.form}}}")
        if panel.line is not None:
            axes.axvline(panel.line, color=INK, linestyle="--")
        for label, row in rows.items():
            # The value is after the bar, or at its start if references are drawn at its end.
            x = 0.0 if panel.references else panel.quartiles.get(label, [panel.values[label]])[-1]
            text, offset = format(panel.values[label], panel.form), "offset points"
            axes.annotate(text, (x, row), (7, 0), textcoords=offset, va="center_baseline", bbox=_box(PAPER))
    return 27 * len(rows) + 86


def _box(color: str) -> dict[str, Any]:
    """Return the settings of a box that hides what is behind a text."""
    return {"boxstyle": "square,pad=0.1", "facecolor": color, "linewidth": 0}


def curves(
    figure: "Figure", rows: Sequence[Sequence[Panel]], xlabel: str, x_form: Callable[[float], str] | None = None
) -> float:
    """Draw rows of panels with a common x range. With `x_form`, which formats x values, the x axis is logarithmic."""
    xs = sorted({float(x) for panels in rows for panel in panels for curve in panel.curves for x in curve.x})
    heights = [max(panel.height for panel in panels) for panels in rows]
    columns = math.lcm(*map(len, rows))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for number, panels in enumerate(rows):
        span = columns // len(panels)
        for column, panel in enumerate(panels):
            axes = figure.add_subplot(grid[number, column * span : (column + 1) * span])
            _draw_panel(axes, panel)
            axes.set_xlabel(xlabel, loc="right")
            axes.set_xlim((xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1))
            if x_form:
                axes.set_xscale("log")
                axes.set_xticks(xs, [x_form(x) for x in xs])
                axes.set_xticks([], minor=True)
            else:
                axes.locator_params(axis="x", integer=True)
    return sum(heights)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for curve in panel.curves:
        axes.plot(curve.x, curve.y, label=curve.label, clip_on=False, **curve.style)
    labels = [curve.label for curve in panel.curves if curve.label]
    axes.set_title(panel.heading, pad=24 if labels else 6)
    if labels:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(labels), handlelength=1.6)
    if panel.form == "log":
        axes.set_yscale("log", subs=[])
        axes.locator_params(axis="y", subs=(1, 2, 5))
    elif panel.form and axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)
    form = ".4g" if panel.form in ("", "log") else panel.form
    if form == ".0%" and axes.get_ylim()[1] < 0.03:
        form = ".1%"
    axes.yaxis.set_major_formatter(f"{{x:{form}}}")


def histograms(figure: "Figure", panels: Sequence[Histogram]) -> float:
    """Draw histograms of token counts side by side."""
    grid = figure.subplots(1, len(panels), squeeze=False)
    for panel, axes in zip(panels, grid[0], strict=True):
        axes.stairs(panel.counts, panel.edges, fill=True, color=panel.color)
        axes.set_title(panel.heading, pad=20)
        axes.set_xlabel("tokens", loc="right")
        axes.locator_params(axis="y", integer=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        _mark(axes, *panel.mark)
    return 250


def stack(
    figure: "Figure", x: Sequence[float], parts: Mapping[str, Sequence[float]], styles: Mapping[str, Style]
) -> float:
    """Draw a stacked bar of shares of time for each step in `x`. `parts` maps activities to shares, from 0 to 1."""
    axes = figure.subplots()
    step = x[1] - x[0] if len(x) > 1 else 1.0
    bottom = [0.0] * len(x)
    for kind, values in parts.items():
        axes.bar(x, values, 0.92 * step, bottom, label=kind, **_fill(styles[kind]))
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.set_title("where a step's time went, mean over ranks", pad=24)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(parts))
    axes.set_xlim(x[0] - step / 2, x[-1] + step / 2)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step", loc="right")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    return 270
