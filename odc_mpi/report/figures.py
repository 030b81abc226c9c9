"""The two shapes in which benchmarks are shown, each as a picture for pages and as tables for terminals. Local.

over sizes     variants as curves over sizes in bytes; a row per size, a column per variant
side by side   variants as bars below each other; a row per variant, a column per figure
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from odc_mpi.report.page import Figure, Report, Table
from odc_mpi.report.picture_parts import BLUE, GREEN, ORANGE, PLAIN, PURPLE, RED, SKY, Bar, Curve, Look, Panel, picture
from odc_mpi.wording import format_seconds, format_size

#: Of bars, by the beginning of a variant's name; those of our windows have `PLAIN`.
_LOOKS = {
    "collective": Look(ORANGE, "///"),
    "floor": Look("none"),
    # What others do, and what is not ours.
    **dict.fromkeys(("apart", "ceiling", "fsdp2"), Look(SKY, "\\\\\\")),
}
#: Look and marker of each curve, in order.
_LINES = (
    (Look(PURPLE, ":"), "x"),
    (Look(BLUE, "-"), "o"),
    (Look(ORANGE, "-"), "D"),
    (Look(GREEN, "-."), "s"),
    (Look(RED, "--"), "^"),
)
Entry = Mapping[str, Any]


def _gb_per_s_text(entry: Entry) -> str:
    """Write the median GB/s and half the distance of the quartiles; the time where nothing moves."""
    speed = entry["gb_per_s"]
    if speed is None:
        return format_seconds(entry["seconds"]["median"])
    digits = 0 if speed["median"] >= 100 else 1 if speed["median"] >= 10 else 2
    return f"{speed['median']:.{digits}f} ±{(speed['high'] - speed['low']) / 2 / speed['median']:4.0%}"


@dataclass(frozen=True)
class OverSizes:
    """Figures of variants over sizes.

    Attributes:
        heading: The figure and its unit.
        sizes: Entries of a benchmark's object, each with `size_bytes`.
        part: Key under which an entry has its variants.
        titles: Of the variants to show, if they were measured.
        cell: A variant's entry as text.
        told: Added to the heading above a table: the meaning of what stands behind a number.
    """

    heading: str
    sizes: Sequence[Entry]
    part: str
    titles: Mapping[str, str]
    cell: Callable[[Entry], str] = _gb_per_s_text
    told: str = " ± half the distance of the quartiles"

    def measured(self) -> dict[str, str]:
        """Return the titles of the variants that were measured in some size, by name. Local."""
        names = {name for size in self.sizes for name in size[self.part]}
        return {name: title for name, title in self.titles.items() if name in names}

    def panel(self) -> Panel:
        """Return a curve of GB/s for each variant that moves bytes in some size. Local."""
        found = []
        for (name, title), (look, marker) in zip(self.measured().items(), cycle(_LINES), strict=False):
            entries = [(size["size_bytes"], size[self.part].get(name)) for size in self.sizes]
            points = [(x, entry["gb_per_s"]["median"]) for x, entry in entries if entry and entry["gb_per_s"]]
            if points:
                x, y = zip(*points, strict=True)
                found.append(Curve(" ".join(title.split()).replace("_ ", "_"), x, y, look, marker))
        return Panel(self.heading, found, "log", 3.4)

    def table(self) -> Table:
        """Return the table. Local."""
        shown = self.measured()
        rows = [
            [
                format_size(size["size_bytes"]),
                *(self.cell(size[self.part][name]) if name in size[self.part] else "-" for name in shown),
            ]
            for size in self.sizes
        ]
        return Table(self.heading + self.told, ["unit", *shown.values()], rows)


def over_sizes(name: str, title: str, panels: Sequence[OverSizes], xlabel: str, caption: str = "") -> Figure:
    """Show figures over the same sizes. Local."""
    curves = [panel.panel() for panel in panels]
    drawn = picture("curves", name, title, curves, xlabel, lambda x: format_size(round(x)))
    return Figure(drawn, caption, [panel.table() for panel in panels])


@dataclass(frozen=True)
class Column:
    """One figure of variants side by side.

    Attributes:
        heading: The figure and its unit.
        figures: Numbers, or their low, median and high, by variant.
        form: Their number format.
        line: Where the picture has a line.
        beside: The same from elsewhere, by where it comes from and by variant.
        is_drawn: Whether it is in the picture, or in the table alone.
    """

    heading: str
    figures: Mapping[str, Any]
    form: str
    line: float | None = None
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    is_drawn: bool = True

    def bars(self, labels: Mapping[str, str]) -> list[Bar]:
        """Return a bar for each of some variants that has a figure. Local."""
        bars = []
        for name, label in labels.items():
            if name in self.figures:
                figure = self.figures[name]
                value, spread = figure, None
                if isinstance(figure, Mapping):
                    value, spread = figure["median"], (figure["low"], figure["high"])
                beside = {source: values[name] for source, values in self.beside.items() if name in values}
                look = _LOOKS.get(name.split("/")[0], PLAIN)
                bars.append(Bar(label, value, look, spread, beside))
        return bars


def side_by_side(
    name: str, title: str, columns: Sequence[Column], labels: Mapping[str, str], caption: str = ""
) -> Figure:
    """Show figures of variants side by side. Local."""
    panels: dict[str, list[Bar]] = {}
    cells: dict[str, dict[str, str]] = {}
    for column in columns:
        bars = column.bars(labels)
        cells[column.heading] = {bar.label: _bar_text(bar, column.form) for bar in bars}
        for source in dict.fromkeys(source for bar in bars for source in bar.beside):
            cells[source] = {bar.label: format(bar.beside[source], column.form) for bar in bars if source in bar.beside}
        if column.is_drawn:
            panels[column.heading] = bars
    shown = [label for label in labels.values() if any(label in own for own in cells.values())]
    rows = [[label, *(own.get(label, "") for own in cells.values())] for label in shown]
    drawn = [column for column in columns if column.is_drawn]
    forms, lines = [column.form for column in drawn], [column.line for column in drawn]
    return Figure(picture("bars", name, title, panels, forms, lines), caption, [Table("", ["", *cells], rows)])


def _bar_text(bar: Bar, form: str) -> str:
    quartiles = f" [{bar.spread[0]:{form}}, {bar.spread[1]:{form}}]" if bar.spread else ""
    return f"{bar.value:{form}}{quartiles}"


def told_ranks(result: Entry) -> str:
    """Write the MPI library, ranks and nodes of a benchmark's object. Local."""
    ranks, nodes = result["ranks"], result["nodes"]
    return f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}"


def report_on(
    result: Entry,
    title: str,
    lead: Sequence[str],
    figures: Sequence[Figure],
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Return a report with what all benchmarks' objects may have: load, what was left out, goals. Local."""
    if "load_average" in result:
        lead = [*lead, "load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])]
    left_out = [f"left out: {name}, {reason}" for name, reason in result.get("left_out", {}).items()]
    return Report(title, lead, [*notes, *left_out], figures, [*tables, *_goals(result)])


def _goals(result: Entry) -> list[Table]:
    rows = [
        [
            " ".join(word.replace("_", " ") for word in (goal["goal"], goal.get("variant", ""))).strip(),
            "" if goal.get("size_bytes") is None else format_size(goal["size_bytes"]),
            f"{goal['figure']:.3g}",
            f"{goal['expected']:g}",
            "yes" if goal["reached"] else "no",
        ]
        for goal in result.get("goals", ())
    ]
    return [Table("Goals", ["", "size", "figure", "goal", "reached"], rows)] if rows else []
