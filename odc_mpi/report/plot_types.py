"""Data types, colors and styles of plots. The types are drawn by `report.plots`."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from odc_mpi.report.svg import Drawing

#: Colors of text, secondary text, lines and background. HTML pages replace these colors in dark mode.
INK, MUTED, LINE, PAPER = "#1f2328", "#6e7781", "#d0d7de", "#ffffff"
#: Colors of the Okabe-Ito palette, which people with any kind of color vision can distinguish.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"


class Style(NamedTuple):
    """Color of a bar or a line, and hatch of the bar ("/", "-", a backslash or "") or dashes of the line.

    A bar with the color "none" has only an outline and the hatch. Dashes are "-", "--", ":", "-." or "none".
    """

    color: str
    hatch: str = ""


#: Default styles of a bar and of a line.
PLAIN_STYLE, PLAIN_LINE_STYLE = Style(BLUE), Style(BLUE, "-")


@dataclass(frozen=True)
class Plot:
    """Title of a plot, and the function that draws it without the title.

    `name` is the name for `odc-mpi report --picture`, and the prefix of the element ids in the SVG document.
    """

    name: str
    title: str
    draw: Callable[[], "Drawing"]

    def svg(self, *, standalone: bool = True) -> str:
        """Return the plot as an SVG document. If `standalone`, the document includes the title and a background."""
        return self.draw().document(self.name, textwrap.wrap(self.title, 118) if standalone else ())


class GanttRow(NamedTuple):
    """Timeline of one rank, with `label` to its left: start and end times in seconds, keyed by kind of activity.

    A note has a start time, an end time and a text. A line marks the start, and the text is drawn if it fits.
    """

    label: str
    spans: Mapping[str, Sequence[Sequence[float]]]
    notes: Sequence[tuple[float, float, str]] = ()


class GanttChart(NamedTuple):
    """Gantt chart with the timelines of several ranks, and times in seconds to mark with a line and a text."""

    heading: str
    rows: Sequence[GanttRow]
    end_s: float
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Bar:
    """Bar for one value, with its lower and upper quartile if known, and the values from other sources."""

    label: str
    value: float
    style: Style
    spread: tuple[float, float] | None = None
    references: Mapping[str, float] = field(default_factory=dict)


class BarPanel(NamedTuple):
    """Panel of bars, with the format specification of their values, and a vertical line at the value `line`, if any."""

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
    style: Style = PLAIN_LINE_STYLE
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """Panel of a plot, `height` pixels high, with one or more curves.

    `form` is "log" for a logarithmic y axis, a format specification for one that includes 0, or "" for any other.
    """

    heading: str
    curves: Sequence[Curve]
    form: str = ""
    height: float = 210.0


class Histogram(NamedTuple):
    """Histogram of token counts, with the edges of its bins and positions to mark with a line and a text, in tokens."""

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
