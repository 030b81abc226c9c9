"""Data types of plots, and functions that draw them as SVG.

Elements that differ in color also differ in hatching, marker or label. Hovering over an element shows its value.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from odc_mpi.report.svg import CHARACTER, INK, LINE_HEIGHT, MUTED, PAPER, WIDTH, Axes, Drawing, Style, format_short

#: Color of text on bars, which differs from `PAPER` so that dark mode does not replace it.
_ON_COLOR = "#fffffe"
#: Space for labels to the left of axes and space between panels, in pixels; maximum number of hover areas per panel.
_LEFT, _GAP, _MAX_HOVER = 62.0, 34.0, 200


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


@dataclass(frozen=True)
class Bar:
    """Bar for one value, with its lower and upper quartiles, if known, and values from other sources."""

    label: str
    value: float
    style: Style
    spread: tuple[float, float] | None = None
    references: Mapping[str, float] = field(default_factory=dict)


class BarPanel(NamedTuple):
    """Panel of bars, with a format specification for their values, and a vertical line at `line` unless it is None."""

    heading: str
    bars: Sequence[Bar]
    form: str
    line: float | None = None


class Curve(NamedTuple):
    """Curve in a panel. It appears in the legend unless its label is "". Missing values are NaN.

    `marker` is drawn at each point (see `svg.Drawing.marker`).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """Panel of a plot, `height` pixels high, with one or more curves.

    `form` is "log" for a logarithmic y axis, a format specification for a y axis that includes 0, or "" otherwise.
    """

    heading: str
    curves: Sequence[Curve]
    form: str = ""
    height: float = 210.0


class Histogram(NamedTuple):
    """Histogram of token counts. Bin edges, and the positions to mark with a line and a label, are in tokens."""

    heading: str
    edges: Sequence[float]
    counts: Sequence[float]
    style: Style
    marks: Sequence[tuple[float, str]]


#: Maximum number of ranks in a plot, so that a reader can distinguish the rows.
MAX_RANKS = 32


def choose_ranks(busy_s: Sequence[float]) -> list[int]:
    """Return all ranks, or `MAX_RANKS` ranks evenly spaced from least to most busy, in ascending order of rank."""
    count = len(busy_s)
    if count <= MAX_RANKS:
        return list(range(count))
    by_work = sorted(range(count), key=busy_s.__getitem__)
    return sorted({by_work[i * (count - 1) // (MAX_RANKS - 1)] for i in range(MAX_RANKS)})


def gantt(charts: Sequence[GanttChart], styles: Mapping[str, Style]) -> Drawing:
    """Draw Gantt charts one below the other. `styles` maps each kind of span to its style, in drawing order."""
    drawing, end_s, row_height = Drawing(), max(chart.end_s for chart in charts), 24
    for chart in charts:
        if chart.heading:
            drawing.text(0, drawing.height + 14, chart.heading, font_weight="bold")
        top = drawing.height + LINE_HEIGHT * (bool(chart.heading) + bool(chart.marks)) + 6
        height = row_height * len(chart.rows)
        axes = Axes(drawing, _LEFT, top, WIDTH - _LEFT - 10, height, (0, end_s))
        for number, row in enumerate(chart.rows):
            drawing.text(0, top + row_height * (number + 0.5) + 3, row.label)
            _draw_row(axes, top + row_height * number + 2, row_height - 4, row, styles)
        for at, text in chart.marks:
            axes.mark(at, text, rise=14)
        drawing.height = top + height + 8
    axes.draw_x(lambda x: f"{x:g}")
    drawing.text(_LEFT + axes.width, drawing.height + 28, "seconds", MUTED, text_anchor="end")
    used = [kind for kind in styles if any(row.spans.get(kind) for chart in charts for row in chart.rows)]
    drawing.legend(_LEFT, drawing.height + 32, ((kind, styles[kind], "") for kind in used), as_bars=True)
    drawing.height += 40
    return drawing


def _draw_row(axes: Axes, y: float, height: float, row: GanttRow, styles: Mapping[str, Style]) -> None:
    texts = {(began, ended): text for began, ended, text in row.notes}
    for kind, style in styles.items():
        for began, ended in row.spans.get(kind, ()):
            width = axes.x(ended) - axes.x(began)
            if width > 0.1:  # below a tenth of a pixel it is invisible
                text = texts.get((began, ended), "")
                hover = f"{row.label} {kind}{text and f' {text} tokens'}, {ended - began:.3g} s"
                axes.drawing.bar(axes.x(began), y, width, height, style, hover)
    color = next(iter(styles.values())).color
    for began, ended, text in row.notes:
        left, width = axes.x(began), axes.x(ended) - axes.x(began)
        if width > 3:
            axes.drawing.add("rect", x=left, y=y, width=1.0, height=height, fill=PAPER)
        if width > CHARACTER * (len(text) + 1):
            wide = CHARACTER * len(text) + 2
            box: dict[str, Any] = {"x": left + (width - wide) / 2, "y": y + height / 2 - 6, "width": wide}
            axes.drawing.add("rect", fill=color, height=12, **box)
            place: dict[str, Any] = {"text_anchor": "middle", "font_size": 11, "pointer_events": "none"}
            axes.drawing.text(left + width / 2, y + height / 2 + 4, text, _ON_COLOR, **place)


def bars(panels: Sequence[BarPanel]) -> Drawing:
    """Draw panels side by side. All panels must have bars for the same labels, in the same order."""
    rows, row_height = panels[0].bars, 27
    label_width = CHARACTER * max(len(bar.label) for bar in rows) + 14
    drawing, height = Drawing(), row_height * len(rows)
    width = (WIDTH - label_width - _GAP * (len(panels) - 1) - 10) / len(panels)
    for number, panel in enumerate(panels):
        values = [x for bar in panel.bars for x in (bar.value, *(bar.spread or ()), *bar.references.values())]
        left = label_width + number * (width + _GAP)
        axes = Axes(drawing, left, 26, width, height, (0, 1.22 * max([1e-9, *values])))
        drawing.text(left, 14, panel.heading, font_weight="bold")
        axes.draw_x(f"{{:{panel.form}}}".format)
        for row, bar in enumerate(panel.bars):
            _draw_bar(axes, 26 + row_height * row, row_height, bar, panel.form)
        if panel.line is not None:
            drawing.line([(axes.x(panel.line), 26), (axes.x(panel.line), 26 + height)], Style(INK, "--"))
        names = dict.fromkeys(name for bar in panel.bars for name in bar.references)
        drawing.legend(
            left, height + 64, ((name, Style(INK, "none"), marker) for name, marker in zip(names, "Dos^", strict=False))
        )
        drawing.height = max(drawing.height, height + (72 if names else 50))
    for row, bar in enumerate(rows):
        drawing.text(0, 26 + row_height * (row + 0.5) + 4, bar.label)
    return drawing


def _draw_bar(axes: Axes, y: float, height: float, bar: Bar, form: str) -> None:
    drawing, text, middle, end = axes.drawing, format(bar.value, form), y + height / 2, bar.value
    drawing.bar(axes.left, y + 4, axes.x(bar.value) - axes.left, height - 8, bar.style, f"{bar.label}: {text}")
    if bar.spread is not None:
        low, high = map(axes.x, bar.spread)
        path = f"M{low:.1f},{middle - 4} v8 m0,-4 H{high:.1f} m0,-4 v8"
        drawing.add("path", d=path, fill="none", stroke=INK, stroke_width=1.4)
        end = max(end, bar.spread[1])
    # The value is after the bar, or at its start if references are drawn at its end. The box hides lines behind it.
    x = axes.x(0.0 if bar.references else end) + 7
    drawing.add("rect", x=x - 3, y=middle - 8, width=CHARACTER * len(text) + 6, height=16, fill=PAPER)
    drawing.text(x, middle + 4, text)
    for value, marker in zip(bar.references.values(), "Dos^", strict=False):
        drawing.marker(axes.x(value), middle, marker, INK)


def curves(rows: Sequence[Sequence[Panel]], xlabel: str, x_form: Callable[[float], str] | None = None) -> Drawing:
    """Draw rows of panels with a common x range. With `x_form`, which formats x values, the x axis is logarithmic."""
    drawing = Drawing()
    xs = sorted({float(x) for panels in rows for panel in panels for curve in panel.curves for x in curve.x})
    for panels in rows:
        top, width = drawing.height, (WIDTH - _GAP * (len(panels) - 1)) / len(panels)
        for number, panel in enumerate(panels):
            _draw_panel(drawing, number * (width + _GAP), top, width, panel, xs, xlabel, x_form)
    return drawing


def _draw_panel(
    drawing: Drawing,
    left: float,
    top: float,
    width: float,
    panel: Panel,
    xs: Sequence[float],
    xlabel: str,
    x_form: Callable[[float], str] | None,
) -> None:
    drawing.text(left, top + 14, panel.heading, font_weight="bold")
    labeled = [(curve.label, curve.style, curve.marker) for curve in panel.curves if curve.label]
    drawing.legend(left, top + 34, labeled)
    space = 46 if labeled else 26
    low, high = _limits(panel)
    if panel.form == ".0%" and high < 0.03:
        panel = replace(panel, form=".1%")
    ends = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    axes = Axes(drawing, left + _LEFT, top + space, width - _LEFT - 8, panel.height - space - 44, ends, (low, high))
    axes.log_x, axes.log_y = x_form is not None, panel.form == "log"
    axes.draw_y(lambda y: format_short(y) if panel.form in ("log", "") else format(y, panel.form))
    axes.draw_x(x_form or (lambda x: f"{x:g}"), xs if x_form else None, min_unit=1)
    drawing.text(left + width - 8, top + panel.height - 10, xlabel, MUTED, text_anchor="end")
    for curve in panel.curves:
        drawing.line(((axes.x(x), axes.y(y)) for x, y in zip(curve.x, curve.y, strict=True)), curve.style)
        for x, y in zip(curve.x, curve.y, strict=True) if curve.marker else ():
            if not math.isnan(y):
                drawing.marker(axes.x(x), axes.y(y), curve.marker, curve.style.color)
    at = sorted({x for curve in panel.curves for x in curve.x})
    at = at[:: max(1, math.ceil(len(at) / _MAX_HOVER))]
    axes.hover(at, [_values_at(panel, x, f"{xlabel} {x_form(x) if x_form else f'{x:g}'}") for x in at])
    drawing.height = max(drawing.height, top + panel.height)


def _limits(panel: Panel) -> tuple[float, float]:
    """Return the limits of the y axis, with a margin. If the panel has a number format, the limits include 0."""
    values = [y for curve in panel.curves for y in curve.y if not math.isnan(y)] or [0.0, 1.0]
    low, high = min(values), max(values)
    if panel.form == "log":
        return low / 1.2, high * 1.2
    if panel.form:
        low = min(0.0, low)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if panel.form and low == 0 else low - margin), high + margin


def _values_at(panel: Panel, x: float, place: str) -> str:
    values = [
        f"{curve.label or panel.heading}: {format(y, panel.form if panel.form not in ('', 'log') else '.4g')}"
        for curve in panel.curves
        for curve_x, y in zip(curve.x, curve.y, strict=True)
        if curve_x == x and not math.isnan(y)
    ]
    return "\n".join([place, *values])


def histograms(panels: Sequence[Histogram]) -> Drawing:
    """Draw histograms of token counts side by side."""
    drawing, height = Drawing(height=250), 170
    width = (WIDTH - _GAP * (len(panels) - 1)) / len(panels)
    for number, panel in enumerate(panels):
        left = number * (width + _GAP)
        drawing.text(left, 14, panel.heading, font_weight="bold")
        ends = (panel.edges[0], panel.edges[-1] if panel.edges[-1] > panel.edges[0] else panel.edges[0] + 1)
        top = (0, 1.12 * max(1, *panel.counts))
        axes = Axes(drawing, left + _LEFT, 26, width - _LEFT - 8, height, ends, top)
        axes.draw_y(lambda y: f"{y:,.0f}")
        for begin, end, count in zip(panel.edges, panel.edges[1:], panel.counts, strict=False):
            hover = f"{begin:,.0f} to {end:,.0f} tokens: {count:,.0f}"
            box = axes.x(begin), axes.y(count), axes.x(end) - axes.x(begin) - 0.7, axes.top + height - axes.y(count)
            drawing.bar(*box, panel.style, hover)
        axes.draw_x(lambda x: f"{x:,.0f}")
        drawing.text(left + width - 8, height + 60, "tokens", MUTED, text_anchor="end")
        for at, text in panel.marks:
            axes.mark(at, text)
    return drawing


def stack(x: Sequence[float], parts: Mapping[str, Sequence[float]], styles: Mapping[str, Style]) -> Drawing:
    """Draw a stacked bar of shares of time for each step in `x`. `parts` maps activities to shares, from 0 to 1."""
    drawing, top, height = Drawing(height=270), 48, 180
    step = x[1] - x[0] if len(x) > 1 else 1.0
    axes = Axes(drawing, _LEFT, top, WIDTH - _LEFT - 8, height, (x[0] - step / 2, x[-1] + step / 2))
    drawing.text(0, 14, "where a step's time went, mean over ranks", font_weight="bold")
    drawing.legend(0, 36, ((kind, styles[kind], "") for kind in parts), as_bars=True)
    axes.draw_y(lambda y: f"{y:.0%}")
    for number, at in enumerate(x):
        bottom, hover = 0.0, "\n".join(f"{kind}: {values[number]:.1%}" for kind, values in parts.items())
        left, right = axes.x(at - 0.46 * step), axes.x(at + 0.46 * step)
        for kind, values in parts.items():
            box = axes.y(bottom + values[number]), right - left, axes.y(bottom) - axes.y(bottom + values[number])
            drawing.bar(left, *box, styles[kind], f"step {at:g}\n{hover}")
            bottom += values[number]
    axes.draw_x(lambda value: f"{value:g}", min_unit=1)
    drawing.text(WIDTH - 8, 262, "step", MUTED, text_anchor="end")
    return drawing
