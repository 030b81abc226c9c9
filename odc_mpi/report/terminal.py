"""Reports for the terminal, which show tables instead of plots, and no title, tiles, groups or collapsed texts."""

import textwrap

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from odc_mpi.report.page import ReportPage, Table


def render(report: ReportPage) -> Group:
    """Convert a report to a rich renderable for a terminal with at least 80 columns."""
    parts: list[RenderableType] = [Text(line) for line in (*report.subtitle, *report.notes)]
    for figure in report.figures:
        parts += [Text(), Text(figure.plot.title, "bold"), *map(_table, figure.tables)]
        parts += [Text(figure.caption)] if figure.caption else []
    for table in report.tables:
        parts += [Text(), _table(table)]
    return Group(*parts)


def _table(table: Table) -> RichTable:
    rows = RichTable(box=SIMPLE, pad_edge=False, title=Text(table.heading), title_justify="left", title_style="")
    for i, column in enumerate(table.columns):
        heading = "\n".join(textwrap.fill(line, 14, break_long_words=False) for line in column.splitlines())
        rows.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in table.rows:
        rows.add_row(*map(Text, row))
    return rows
