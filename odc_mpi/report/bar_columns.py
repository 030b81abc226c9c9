"""Comparisons of the variants of a benchmark: bar plots for HTML pages, and tables for terminals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from odc_mpi.report import plots
from odc_mpi.report.page import Figure, Table
from odc_mpi.report.plot_types import ORANGE, PLAIN_STYLE, SKY, Bar, Plot, Style

#: Styles of bars, keyed by the first component of the variant's name. Other variants have `PLAIN_STYLE`.
_STYLES = {
    "collective": Style(ORANGE, "/"),
    "floor": Style("none"),
    # References that do not use this package for communication.
    **dict.fromkeys(("ceiling", "fsdp2"), Style(SKY, "\\")),
}


@dataclass(frozen=True)
class BarColumn:
    """Values of one quantity for all variants, shown as a panel of the plot and a column of the table.

    Attributes:
        figures: Values, keyed by variant. Each is a number, or a mapping with the keys `low`, `median` and `high`.
        number_format: Format specification for the values, such as ".2f".
        line: Value at which the panel has a vertical line, or None.
        references: Values of the same quantity from other sources, such as a simulation, keyed by source and variant.
    """

    heading: str
    figures: Mapping[str, Any]
    number_format: str
    line: float | None = None
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def bars(self, names: Iterable[str]) -> list[Bar]:
        """Return a bar for each variant in `names` that has a value."""
        bars = []
        for name in names:
            if name in self.figures:
                value, spread = self.figures[name], None
                if isinstance(value, Mapping):
                    value, spread = value["median"], (value["low"], value["high"])
                references = {source: values[name] for source, values in self.references.items() if name in values}
                bars.append(Bar(name, value, _STYLES.get(name.split("/")[0], PLAIN_STYLE), spread, references))
        return bars


def bar_table(name: str, title: str, columns: Sequence[BarColumn], names: Iterable[str], caption: str = "") -> Figure:
    """Create a figure with a bar plot and a table, both of which compare the variants in `names`."""
    cells: dict[str, dict[str, str]] = {}
    for column in columns:
        form, bars = column.number_format, column.bars(names)
        cells[column.heading] = {bar.label: _bar_text(bar, form) for bar in bars}
        for bar in bars:
            for source, value in bar.references.items():
                cells.setdefault(source, {})[bar.label] = format(value, form)
    rows = [[label, *(cells_of_column.get(label, "") for cells_of_column in cells.values())] for label in names]
    panels = {column.heading: column.bars(names) for column in columns}
    draw = partial(plots.bars, panels, [c.number_format for c in columns], [c.line for c in columns])
    table = Table("", ["", *cells], [row for row in rows if any(row[1:])])
    return Figure(Plot(name, title, draw), caption, [table])


def _bar_text(bar: Bar, form: str) -> str:
    quartiles = f" [{bar.spread[0]:{form}}, {bar.spread[1]:{form}}]" if bar.spread else ""
    return f"{bar.value:{form}}{quartiles}"
