"""Data types of plots, with colors and hatches. `report.plots` draws them."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from odc_mpi.report.svg import Drawing

#: Text, lines and background. A page replaces them in dark mode.
INK, MUTED, LINE, PAPER = "#1f2328", "#6e7781", "#d0d7de", "#ffffff"
#: Colors of Okabe and Ito, which are distinguishable with any kind of color vision.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"


class Style(NamedTuple):
    """Style of a bar or a line.

    Attributes:
        color: Color of the bar or line. "none" draws only the hatch of a bar.
        hatch: Hatch of a bar: a slash, a backslash or "-". Style of a line: "-", "--", ":", "-." or "none".
    """

    color: str
    hatch: str = ""


#: Default styles of a bar and of a line.
PLAIN_STYLE, PLAIN_LINE_STYLE = Style(BLUE), Style(BLUE, "-")


@dataclass(frozen=True)
class Plot:
    """Plot that is drawn by a function of `report.plots`.

    Attributes:
        name: Name of the plot on the command line. It also determines the ids in the document.
        draw: Function that draws the plot without its title.
    """

    name: str
    title: str
    draw: Callable[[], "Drawing"]

    def svg(self, *, standalone: bool = True) -> str:
        """Return an SVG document, with the title and a background if it is `standalone`."""
        return self.draw().document(self.name, textwrap.wrap(self.title, 118) if standalone else ())


@dataclass(frozen=True)
class GanttRow:
    """Timeline of one rank.

    Attributes:
        label: Text at the left of the row.
        spans: Start and end times of spans, in seconds, by kind of span.
        notes: Start and end times with a text, which is drawn if it fits between them. A line marks each start.
    """

    label: str
    spans: Mapping[str, Sequence[Sequence[float]]]
    notes: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class GanttChart:
    """Timelines of several ranks.

    Attributes:
        end_s: Time at which the chart ends, in seconds.
        marks: Times in seconds, each with a text.
        saved_s: Seconds by which this chart ends earlier than the chart above it.
    """

    heading: str
    rows: Sequence[GanttRow]
    end_s: float
    marks: Sequence[tuple[float, str]] = ()
    saved_s: float = 0.0


@dataclass(frozen=True)
class Bar:
    """Bar for one value.

    `spread` has its lower and upper quartile, if they are known. `references` are values from other sources, by source.
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
        label: Text in the legend, or "".
        y: Value at each `x`, NaN for a missing value.
        marker: Marker of each point, as in `svg.Drawing.marker`.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = PLAIN_LINE_STYLE
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves in one pair of axes.

    Attributes:
        form: Format specification of the numbers on the y axis, which then includes 0; or "log" for a logarithmic axis.
    """

    heading: str
    curves: Sequence[Curve]
    form: str = ""
    height: float = 210.0


@dataclass(frozen=True)
class Histogram:
    """Histogram of token counts.

    Attributes:
        edges: Edges of the bins, in tokens.
        marks: Positions on the x axis, in tokens, each with a text.
    """

    heading: str
    edges: Sequence[float]
    counts: Sequence[float]
    style: Style
    marks: Sequence[tuple[float, str]]


#: Maximum number of rows in a plot that a reader can distinguish.
MAX_RANKS = 32


def choose_ranks(busy_s: Sequence[float]) -> list[int]:
    """Select at most `MAX_RANKS` ranks to plot, evenly spaced from the least to the most busy."""
    count = len(busy_s)
    if count <= MAX_RANKS:
        return list(range(count))
    by_work = sorted(range(count), key=busy_s.__getitem__)
    return sorted({by_work[i * (count - 1) // (MAX_RANKS - 1)] for i in range(MAX_RANKS)})
