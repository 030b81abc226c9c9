"""What pictures are made of: plain data, colours and hatches. Nothing here draws."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

#: Ink, lines and background, which a page may replace to suit a dark screen.
INK, MUTED, LINE, PAPER = "#1f2328", "#6e7781", "#d0d7de", "#ffffff"
#: Colours of Okabe and Ito, which people with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"


class Style(NamedTuple):
    """How something is drawn.

    Attributes:
        color: Of its face; "none" for hatching alone.
        hatch: Of its face, or the style of a line, as matplotlib has them.
    """

    color: str
    hatch: str = ""


#: Of a bar and of a line, where nothing else is asked for.
PLAIN_STYLE, PLAIN_LINE_STYLE = Style(BLUE), Style(BLUE, "-")


@dataclass(frozen=True)
class Plot:
    """A picture, drawn when it is looked at.

    Attributes:
        name: By which it is asked for.
        title: What is to be seen; drawn into it as well.
        draw: Returns it as an SVG document.
    """

    name: str
    title: str
    draw: Callable[[], str]

    @cached_property
    def svg(self) -> str:
        """The document."""
        return self.draw()


def make_plot(kind: str, name: str, title: str, *parts: Any) -> Plot:
    """Make a picture of one of the kinds in `report.plots`."""

    def draw() -> str:
        from odc_mpi.report import plots  # not at the top: matplotlib takes a second, and terminals need none

        return plots.draw(kind, name, title, *parts)

    return Plot(name, title, draw)


@dataclass(frozen=True)
class GanttRow:
    """What one rank did.

    Attributes:
        label: Its name.
        spans: Beginnings and ends in seconds, by kind.
        notes: Parts with a beginning, which is shown, an end and a text, which is left out where there is no room.
    """

    label: str
    spans: Mapping[str, Sequence[Sequence[float]]]
    notes: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class GanttChart:
    """Ranks below each other.

    Attributes:
        heading: Of the chart.
        rows: The ranks.
        end_s: Where it ends.
        marks: Points in time with a text.
        saved_s: By how much it ends earlier than the one above.
    """

    heading: str
    rows: Sequence[GanttRow]
    end_s: float
    marks: Sequence[tuple[float, str]] = ()
    saved_s: float = 0.0


@dataclass(frozen=True)
class Bar:
    """A figure with a name.

    Attributes:
        label: The name.
        value: Of the figure.
        style: Of the bar.
        spread: The quartiles, where there are.
        references: The same from elsewhere, by where it comes from.
    """

    label: str
    value: float
    style: Style
    spread: tuple[float, float] | None = None
    references: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """Points that belong together.

    Attributes:
        label: Written beside its end; "" for none.
        x: Positions.
        y: Values; nan where there is none.
        style: Of the line.
        marker: On each point.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = PLAIN_LINE_STYLE
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves over one axis.

    Attributes:
        heading: Above the axes.
        curves: Drawn into the same axes.
        form: Number format at the y axis; "log" for a logarithmic one.
        height: In inches.
    """

    heading: str
    curves: Sequence[Curve]
    form: str = ""
    height: float = 2.2


@dataclass(frozen=True)
class Histogram:
    """A histogram.

    Attributes:
        heading: Name of the things that are counted.
        edges: Of the bars, in tokens.
        counts: Between the edges.
        style: Of the bars.
        marks: Places with a text.
    """

    heading: str
    edges: Sequence[float]
    counts: Sequence[float]
    style: Style
    marks: Sequence[tuple[float, str]]


#: More than this many lines cannot be told apart in a picture.
MAX_RANKS = 32


def choose_ranks(busy_s: Sequence[float]) -> list[int]:
    """Return the ranks that a picture shows: all, or of many the most and the least busy and some between."""
    count = len(busy_s)
    if count <= MAX_RANKS:
        return list(range(count))
    by_work = sorted(range(count), key=busy_s.__getitem__)
    return sorted({by_work[i * (count - 1) // (MAX_RANKS - 1)] for i in range(MAX_RANKS)})
