"""SVG plots of the data in `report.plot_types`, 900 pixels wide; the only module that uses matplotlib.

Everything that differs by color also differs by hatching or by a label.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from odc_mpi.report.plot_types import INK, LINE, MUTED, PAPER, Bar, Curve, GanttChart, GanttRow, Histogram, Panel, Style

#: Text on colored bars; differs from `PAPER`, so that dark mode does not replace it.
_ON_COLOR = "#fffffe"
_WIDTH = 12.5  # inches of 72 points: 900 points, shown as 900 pixels
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 11.0,
    "hatch.linewidth": 0.7,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "axes.edgecolor": MUTED,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
}


def draw(kind: str, name: str, title: str, parts: Sequence[Any]) -> str:
    """Draw a plot as an SVG document. The arguments are the attributes of `Plot`."""
    settings: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the matplotlib configuration of the user
        matplotlib.rcParams.update(settings)
        figure = KINDS[kind](*parts)
        figure.suptitle(textwrap.fill(title, 104), x=0.01, ha="left", size=13, weight="bold")
        text = StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue().replace("'DejaVu Sans'", "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif")
    return re.sub(r'(width|height)="([0-9.]+)pt"', r'\1="\2"', svg, count=2)


def gantt(charts: Sequence[GanttChart], styles: Mapping[str, Style]) -> Figure:
    """Draw Gantt charts, one below the other. `styles` maps each kind of span to its style, in drawing order."""
    heights = [0.24 * len(chart.rows) + 0.1 for chart in charts]
    figure = _figure(sum(heights) + 0.5 * len(charts) + 1.1)
    all_axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end_s = max(chart.end_s for chart in charts)
    for axes, chart in zip(all_axes, charts, strict=True):
        axes.set_title(chart.heading, pad=18 if chart.marks else 6)
        for y, row in enumerate(chart.rows):
            _draw_row(axes, y, row, styles, end_s)
        axes.set_yticks(range(len(chart.rows)), [row.label for row in chart.rows])
        axes.set_ylim(len(chart.rows) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        _draw_marks(axes, chart)
    axes.set_xlim(0, end_s)
    axes.set_xlabel("seconds")
    used = [kind for kind in styles if any(row.spans.get(kind) for chart in charts for row in chart.rows)]
    _legend(figure, {kind: styles[kind] for kind in used})
    return figure


def _draw_row(axes: Axes, y: int, row: GanttRow, styles: Mapping[str, Style], end_s: float) -> None:
    for kind, style in styles.items():
        # Spans below a tenth of a pixel are invisible.
        bars = [(b, e - b) for b, e in row.spans.get(kind, ()) if e - b > end_s / 9000]
        axes.broken_barh(bars, (y - 0.4, 0.8), **{**_face(style), "linewidth": 0})
    starts = [began for began, ended, _ in row.notes if ended - began > end_s / 300]
    axes.vlines(starts, y - 0.4, y + 0.4, PAPER, linewidth=1.0)
    box = {"facecolor": next(iter(styles.values())).color, "edgecolor": "none", "pad": 0.6}
    for began, ended, text in row.notes:
        if ended - began > end_s * 0.009 * len(text):
            axes.text((began + ended) / 2, y, text, ha="center", va="center", size=9, color=_ON_COLOR, bbox=box)


def _draw_marks(axes: Axes, chart: GanttChart) -> None:
    for at, text in chart.marks:
        axes.axvline(at, color=INK, linewidth=1.0)
        axes.annotate(text, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points")
    if chart.saved_s > 0:
        middle = (len(chart.rows) - 1) / 2
        both = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (chart.end_s, middle), (chart.end_s + chart.saved_s, middle), arrowprops=both)
        at = chart.end_s + chart.saved_s / 2
        axes.annotate(
            f"saved\n{chart.saved_s:.3g} s",
            (at, middle),
            (0, 5),
            textcoords="offset points",
            ha="center",
            weight="bold",
        )


def bars(panels: Mapping[str, Sequence[Bar]], form: Sequence[str], reference: Sequence[float | None]) -> Figure:
    """Draw panels of horizontal bars side by side. `form`: number format per panel; `reference`: line per panel."""
    rows = next(iter(panels.values()))
    figure = _figure(0.36 * len(rows) + 1.6)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (heading, bars_of_panel), bar_form, line in zip(all_axes, panels.items(), form, reference, strict=True):
        axes.set_title(heading)
        for y, bar in enumerate(bars_of_panel):
            _draw_bar(axes, y, bar, bar_form)
        _draw_references(axes, bars_of_panel)
        values = [x for bar in bars_of_panel for x in (bar.value, *(bar.spread or ()), *bar.references.values())]
        axes.set_xlim(0, 1.18 * max([1e-9, *values]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _, panel_form=bar_form: format(x, panel_form)))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="x")
        if line is not None:
            axes.axvline(line, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
    axes.set_yticks(range(len(rows)), [bar.label for bar in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for axes in all_axes:
        axes.tick_params(axis="y", length=0)
    return figure


def _draw_bar(axes: Axes, y: int, bar: Bar, form: str) -> None:
    axes.barh(y, bar.value, 0.66, **_face(bar.style))
    end = bar.value
    if bar.spread is not None:
        axes.plot(bar.spread, (y, y), color=INK, linewidth=1.4, marker="|", markersize=8)
        end = max(end, bar.spread[1])
    # The value is after the bar, or at its start if references are drawn at its end. The box hides lines behind it.
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
    text, at = format(bar.value, form), 0.0 if bar.references else end
    axes.annotate(text, (at, y), (8, 0), textcoords="offset points", va="center", bbox=box)


def _draw_references(axes: Axes, bars: Sequence[Bar]) -> None:
    names = dict.fromkeys(name for bar in bars for name in bar.references)
    for name, marker in zip(names, "Do^s", strict=False):
        points = [(bar.references[name], y) for y, bar in enumerate(bars) if name in bar.references]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker, color=PAPER, markeredgecolor=INK, markersize=7, label=name)
    if names:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=len(names), handletextpad=0.2)


def curves(panels: Sequence[Panel], xlabel: str, x_form: Callable[[float], str] | None = None) -> Figure:
    """Draw panels of curves, one below the other, on a common x axis, which is logarithmic if `x_form` is given."""
    heights = [panel.height for panel in panels]
    figure = _figure(sum(heights) + 0.4 * len(panels) + 0.6)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.set_title(panel.heading)
        for curve in panel.curves:
            axes.plot(
                curve.x, curve.y, curve.style.hatch or "-", color=curve.style.color, marker=curve.marker, linewidth=1.6
            )
        axes.grid()
        _scale(axes, panel.form)
        if x_form is not None:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: x_form(x)))
            axes.set_xticks(sorted({x for curve in panel.curves for x in curve.x}))
            axes.minorticks_off()
        _label_ends(axes, panel.curves)
    axes.set_xlabel(xlabel)
    return figure


def _scale(axes: Axes, form: str) -> None:
    if form == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    elif form:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format(y, form)))
        axes.set_ylim(bottom=0)


def _label_ends(axes: Axes, curves: Iterable[Curve]) -> None:
    """Write labels at the right, each near the end of its curve, without overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(float(to_axes.transform((c.x[-1], c.y[-1]))[1]), c) for c in curves if c.label and len(c.x)]
    ends.sort(key=lambda end: end[0])
    min_distance = 18 / axes.get_window_extent().height
    for (_, curve), at in zip(ends, _spread_labels([height for height, _ in ends], min_distance), strict=True):
        axes.plot(1.015, at, curve.marker, color=curve.style.color, transform=axes.transAxes, clip_on=False)
        axes.text(1.03, at, curve.label, transform=axes.transAxes, va="center")


def _spread_labels(heights: Sequence[float], min_distance: float) -> list[float]:
    """Move ascending heights apart until they are about `min_distance` from each other."""
    moved = list(heights)
    for _ in range(100):
        for i in range(len(moved) - 1):
            push = max(0.0, min_distance - (moved[i + 1] - moved[i])) / 2
            moved[i] -= push
            moved[i + 1] += push
    return moved


def histograms(panels: Sequence[Histogram]) -> Figure:
    """Draw histograms of token counts side by side."""
    figure = _figure(3.4)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set_title(panel.heading)
        axes.bar(panel.edges[:-1], panel.counts, np.diff(panel.edges), align="edge", **_face(panel.style))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.set_ylim(0, 1.12 * max(1, *panel.counts))
        axes.set_xlabel("tokens")
        axes.grid(axis="y")
        for at, text in panel.marks:
            right = at > 0.6 * max(panel.edges)
            axes.axvline(at, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
            offset, side = ((-4, -2), "right") if right else ((4, -2), "left")
            place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": side, "va": "top"}
            axes.annotate(text, (at, 1.0), offset, **place)
    return figure


def stack(
    x: Sequence[float], parts: Mapping[str, Sequence[float]], styles: Mapping[str, Style], xlabel: str, points: Panel
) -> Figure:
    """Draw stacked bars of the fractions `parts` below the curves of `points`, on the same x axis."""
    figure = _figure(5.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.4])
    above.set_title(points.heading)
    for curve in points.curves:
        above.plot(
            curve.x, curve.y, linestyle=curve.style.hatch, color=curve.style.color, marker=curve.marker, markersize=4
        )
    above.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    above.set_ylim(0, 1.05 * max(0.1, *(y for curve in points.curves for y in curve.y)))
    bottom = np.zeros(len(x))
    width = (x[1] - x[0] if len(x) > 1 else 1.0) * 0.92
    for kind, values in parts.items():
        below.bar(x, values, width, bottom, **_face(styles[kind]))
        bottom += np.asarray(values)
    below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    below.set_title("where a step's time went")
    below.set_ylim(0, 1)
    below.set_xlabel(xlabel)
    below.set_xlim(x[0] - width, x[-1] + width)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(axis="y")
    _legend(figure, {kind: styles[kind] for kind in parts})
    return figure


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height + 0.2), dpi=72, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def _face(style: Style) -> dict[str, Any]:
    """Return the matplotlib properties of a bar. The edge color is also the color of the hatch."""
    edge = MUTED if style.color == "none" else PAPER
    return {"facecolor": style.color, "edgecolor": edge, "hatch": style.hatch, "linewidth": 0.5}


def _legend(figure: Figure, styles: Mapping[str, Style]) -> None:
    patches = [Patch(label=kind, **_face(style)) for kind, style in styles.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False)


KINDS: Mapping[str, Callable[..., Figure]] = {
    function.__name__: function for function in (gantt, bars, curves, histograms, stack)
}
