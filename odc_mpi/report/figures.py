"""The two shapes in which benchmarks are shown, each as a picture for pages and as tables for terminals. Local.

over sizes     variants as curves over sizes in bytes; a row per size, a column per variant
side by side   variants as bars below each other; a row per variant, a column per figure
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from odc_mpi.report.page import Figure, Table
from odc_mpi.report.picture_parts import BLUE, GREEN, ORANGE, PURPLE, RED, Bar, Curve, Look, Panel, picture
from odc_mpi.wording import format_seconds, format_size

#: Look and marker of each curve, in order.
_LINES = (
    (Look(PURPLE, ":"), "x"),
    (Look(BLUE, "-"), "o"),
    (Look(ORANGE, "-"), "D"),
    (Look(GREEN, "-."), "s"),
    (Look(RED, "--"), "^"),
)
Entry = Mapping[str, Any]


def gb_per_s(entry: Entry) -> float | None:
    """Return the median GB/s of a variant, None where nothing moves. Local."""
    return entry["gb_per_s"]["median"] if entry["gb_per_s"] else None


def gb_per_s_text(entry: Entry) -> str:
    """Write the median GB/s and half the distance of the quartiles; the time where nothing moves. Local."""
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
        titles: Of the variants to show, if they were measured; None for all variants under their own names.
        value: The figure of a variant as a number, None where there is none.
        cell: The same as text.
        told: Added to the heading above a table: the meaning of what stands behind a number.
    """

    heading: str
    sizes: Sequence[Entry]
    part: str
    titles: Mapping[str, str] | None = None
    value: Callable[[Entry], float | None] = gb_per_s
    cell: Callable[[Entry], str] = gb_per_s_text
    told: str = " ± half the distance of the quartiles"

    def measured(self) -> dict[str, str]:
        """Return the titles of the variants that were measured in some size, by name. Local."""
        names = dict.fromkeys(name for size in self.sizes for name in size[self.part])
        titles = self.titles or {name: name.replace("_", " ") for name in names}
        return {name: title for name, title in titles.items() if name in names}

    def panel(self) -> Panel:
        """Return a curve for each variant that has a figure in some size. Local."""
        found = []
        for (name, title), (look, marker) in zip(self.measured().items(), cycle(_LINES), strict=False):
            figures = [(s["size_bytes"], self.value(s[self.part][name])) for s in self.sizes if name in s[self.part]]
            points = [(x, y) for x, y in figures if y is not None]
            if points:
                x, y = zip(*points, strict=True)
                found.append(Curve(" ".join(title.split()).replace("_ ", "_"), x, y, look, marker))
        return Panel(self.heading, found, "log", 3.4)

    def table(self, first: str = "unit") -> Table:
        """Return the table; `first` is the heading of the sizes. Local."""
        shown = self.measured()
        rows = [
            [
                format_size(size["size_bytes"]),
                *(self.cell(size[self.part][name]) if name in size[self.part] else "-" for name in shown),
            ]
            for size in self.sizes
        ]
        return Table(self.heading + self.told, [first, *shown.values()], rows, is_over_sizes=True)


def over_sizes(name: str, title: str, panels: Sequence[OverSizes], xlabel: str, caption: str = "") -> Figure:
    """Show figures over the same sizes. Local."""
    curves = [panel.panel() for panel in panels]
    drawn = picture("curves", name, title, curves, xlabel, lambda x: format_size(round(x)))
    return Figure(drawn, caption, [panel.table() for panel in panels])


def side_by_side(
    name: str,
    title: str,
    panels: Mapping[str, Sequence[Bar]],
    forms: Sequence[str],
    references: Sequence[float | None],
    caption: str = "",
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> Figure:
    """Show figures of variants side by side. Local.

    Args:
        name: Of the picture.
        title: Of picture and table.
        panels: Bars by heading.
        forms: The number format of each panel.
        references: Where each panel has a line.
        caption: Below picture and table.
        more: Further columns of the table alone: cells by heading and label.
    """
    columns: dict[str, dict[str, str]] = {}
    for (heading, bars), form in zip(panels.items(), forms, strict=True):
        columns[heading] = {bar.label: _bar_text(bar, form) for bar in bars}
        for source in dict.fromkeys(source for bar in bars for source in bar.beside):
            columns[source] = {bar.label: format(bar.beside[source], form) for bar in bars if source in bar.beside}
    for heading, cells in (more or {}).items():
        columns[heading] = dict(cells)
    labels = dict.fromkeys(label for cells in columns.values() for label in cells)
    rows = [[label, *(cells.get(label, "") for cells in columns.values())] for label in labels]
    drawn = picture("bars", name, title, panels, forms, references)
    return Figure(drawn, caption, [Table("", ["", *columns], rows)])


def _bar_text(bar: Bar, form: str) -> str:
    quartiles = f" [{bar.spread[0]:{form}}, {bar.spread[1]:{form}}]" if bar.spread else ""
    return f"{bar.value:{form}}{quartiles}"


def goals(result: Entry) -> list[Table]:
    """Return a table of a benchmark's goals, if it has any. Local."""
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


def told_ranks(result: Mapping[str, Any]) -> str:
    """Write the MPI library, ranks and nodes of a benchmark's object. Local."""
    ranks, nodes = result["ranks"], result["nodes"]
    return f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}"


def told_load(result: Mapping[str, Any]) -> str:
    """Write the load of the node before and after a benchmark. Local."""
    return "load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])
