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
    """Style of a bar or a line.

    Attributes:
        color: Color of the bar or line. A bar with the color "none" has only an outline and the hatch.
        hatch: Hatch of a bar ("/", "-", a backslash or "") or style of a line ("-", "--", ":", "-." or "none").
    """

    color: str
    hatch: str = ""


#: Default styles of a bar and of a line.
PLAIN_STYLE, PLAIN_LINE_STYLE = Style(BLUE), Style(BLUE, "-")


@dataclass(frozen=True)
class Plot:
    """Title of a plot, and the function that draws it.

    Attributes:
        name: Name of the plot for `odc-mpi report --picture`, and prefix of the element ids in the SVG document.
        draw: Function that draws the plot without its title.
    """

    name: str
    title: str
    draw: Callable[[], "Drawing"]

    def svg(self, *, standalone: bool = True) -> str:
        """Return the plot as an SVG document. If `standalone`, the document includes the title and a background."""
        return self.draw().document(self.name, textwrap.wrap(self.title, 118) if standalone else ())


@dataclass(frozen=True)
class GanttRow:
    """Timeline of one rank.

    Attributes:
        label: Text to the left of the row.
        spans: Start and end times of all spans, in seconds, keyed by kind of activity.
        notes: Start time, end time and text of each note. A line marks the start, and the text is drawn if it fits.
    """

    label: str
    spans: Mapping[str, Sequence[Sequence[float]]]
    notes: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class GanttChart:
    """Gantt chart with the timelines of several ranks.

    Attributes:
        end_s: Time at which the chart ends, in seconds.
        marks: Times, in seconds, to mark with a line and a text.
        saved_s: Seconds by which this chart ends earlier than the chart above it, or 0.
    """

    heading: str
    rows: Sequence[GanttRow]
    end_s: float
    marks: Sequence[tuple[float, str]] = ()
    saved_s: float = 0.0


@dataclass(frozen=True)
class Bar:
    """Bar for one value.

    `spread` is the lower and upper quartile, or None if unknown. `references` maps other sources to their values.
    """

    label: str
    value: float
    style: Style
    spread: tuple[float, float] | None = None
    references: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """Curve in a panel.

    Attributes:
        label: Text in the legend, or "" to omit the curve from the legend.
        y: Value at each `x`; NaN if the value is missing.
        marker: Marker at each point (see `svg.Drawing.marker`).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = PLAIN_LINE_STYLE
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """Panel of a plot, with one or more curves.

    Attributes:
        form: "log" for a logarithmic y axis, a format specification for one that includes 0, or "" for any other.
    """

    heading: str
    curves: Sequence[Curve]
    form: str = ""
    height: float = 210.0


@dataclass(frozen=True)
class Histogram:
    """Histogram of token counts.

    Attributes:
        edges: Edges of the bins, in tokens and in ascending order. There is one more edge than there are `counts`.
        marks: Positions on the x axis, in tokens, to mark with a line and a text.
    """

    heading: str
    edges: Sequence[float]
    counts: Sequence[float]
    style: Style
    marks: Sequence[tuple[float, str]]


#: Maximum number of ranks in a plot, so that a reader can distinguish the rows.
MAX_RANKS = 32


def choose_ranks(busy_s: Sequence[float]) -> list[int]:
    """Return all ranks, or at most `MAX_RANKS` ranks evenly spaced from least to most busy, in ascending order."""
    count = len(busy_s)
    if count <= MAX_RANKS:
        return list(range(count))
    by_work = sorted(range(count), key=busy_s.__getitem__)
    return sorted({by_work[i * (count - 1) // (MAX_RANKS - 1)] for i in range(MAX_RANKS)})
