"""Content of a report, and its rendering as a self-contained HTML page or, without plots, for a terminal."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from odc_mpi.formatting import printable_text
from odc_mpi.report.svg import BLUE, INK, LINE, MUTED, PAPER, Draw, write_svg

_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", PAPER: "--paper", BLUE: "--blue"}
_DARK = {"--ink": "#e6edf3", "--muted": "#9aa4af", "--line": "#3d444d", "--paper": "#151b23", "--blue": "#2f81f7"}

_STYLE = """
body { font: 16px/1.5 system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1060px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: 0.3rem; }
h2 { font-size: 1.15rem; line-height: 1.35; margin: 0 0 0.8rem; }
h3 { font-size: 0.95rem; margin: 0 0 0.3rem; }
figure, section { margin: 2.6rem 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; display: block; }
figcaption, .lead { color: var(--muted); max-width: 95ch; margin: 0.2rem 0; }
figcaption, td, th, pre, .note { font-size: 0.88rem; }
.note { border-left: 4px solid #e69f00; padding-left: 0.8rem; margin: 0.4rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.8rem; margin: 1.4rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: 0.7rem 0.8rem; break-inside: avoid; }
.tiles b { display: block; font-size: 1.1rem; letter-spacing: -0.02em; overflow-wrap: anywhere; }
.tiles span { color: var(--muted); font-size: 0.8rem; display: block; line-height: 1.35; }
.groups { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1.6rem 2.4rem; }
.groups div { break-inside: avoid; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 1rem 0.25rem 0; vertical-align: top; text-align: left;
         overflow-wrap: anywhere; white-space: pre-wrap; }
th { font-weight: 600; }
th:first-child { white-space: nowrap; }
.groups td { text-align: right; overflow-wrap: break-word; }
.groups th { font-weight: 400; color: var(--muted); white-space: normal !important; }
pre { overflow-x: auto; background: color-mix(in srgb, var(--line) 35%, transparent); padding: 1rem; }
@media print { :root { font-size: 68%; } body { max-width: none; margin: 0; font-size: 1rem; }
               .tiles div { padding: 0.5rem; } .tiles b { font-size: 1rem; }
               details { display: none; } @page { margin: 14mm; }
               * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


class Tile(NamedTuple):
    """Box at the top of a page with a key result: its name, its value, and a remark below the value."""

    label: str
    value: str
    remark: str = ""


class Table(NamedTuple):
    """Table of text cells, with a heading and column headings. The first column contains the row names."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Figure(NamedTuple):
    """Plot with a title and a caption. Terminals show the tables instead of the plot, and HTML pages on request.

    `name` is the value for `odc-mpi report --picture`, and `draw` draws the plot with matplotlib.
    """

    name: str
    title: str
    draw: Draw
    caption: str = ""
    tables: Sequence[Table] = ()

    def svg(self, *, standalone: bool = True) -> str:
        """Return the plot as an SVG document. If `standalone`, the document includes the title and a background."""
        return write_svg(self.draw, self.name, textwrap.fill(self.title, 105) if standalone else "")


@dataclass(frozen=True)
class ReportPage:
    """Content of a report.

    `subtitle` describes the run or benchmark, and `notes` contains remarks, for example about missing data. `collapsed`
    maps headings to long texts that are hidden at first. `groups` are tables displayed side by side.
    """

    title: str
    subtitle: Sequence[str]
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    collapsed: Mapping[str, str] = field(default_factory=dict)
    tiles: Sequence[Tile] = ()
    groups: Sequence[Table] = ()


def html(report: ReportPage) -> str:
    """Render a report as an HTML document for light mode, dark mode and print."""
    light = "; ".join(f"{name}: {color}" for color, name in _VARIABLES.items())
    dark = "; ".join(f"{name}: {color}" for name, color in _DARK.items())
    variables = f":root {{ color-scheme: light dark; {light} }}\n"
    variables += f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    body = [
        f"<h1>{escape(report.title)}</h1>",
        *(f'<p class="lead">{escape(line)}</p>' for line in report.subtitle),
        *_wrapped("tiles", map(_tile, report.tiles)),
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        *(_figure(figure) for figure in report.figures),
        *(f"<section><h2>{escape(table.heading)}</h2>\n{_table(table)}</section>" for table in report.tables),
        *_wrapped("groups", (f"<div><h3>{escape(group.heading)}</h3>{_table(group)}</div>" for group in report.groups)),
        *(
            f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>"
            for heading, text in report.collapsed.items()
        ),
    ]
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    head += f"<title>{escape(report.title)}</title>\n<style>\n{variables}{_STYLE}</style>"
    text = "\n".join(body)
    return printable_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{text}\n</body>\n</html>\n'
    )


def _wrapped(name: str, parts: Iterable[str]) -> list[str]:
    """Return a list with a div element of CSS class `name` that contains `parts`, or [] if there are no parts."""
    body = "\n".join(parts)
    return [f'<div class="{name}">\n{body}\n</div>'] if body else []


def _tile(tile: Tile) -> str:
    return f"<div><span>{escape(tile.label)}</span><b>{escape(tile.value)}</b><span>{escape(tile.remark)}</span></div>"


def _figure(figure: Figure) -> str:
    """Return an HTML figure, in which the colors of the plot are the CSS variables of the page, with its tables."""
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    svg = figure.svg(standalone=False).replace("<svg", f'<svg role="img" aria-label="{escape(figure.title)}"', 1)
    for color, name in _VARIABLES.items():
        svg = svg.replace(color, f"var({name})")
    tables = "".join(f"<h3>{escape(table.heading)}</h3>{_table(table)}" for table in figure.tables)
    values = f"<details><summary>Values</summary>{tables}</details>" if tables else ""
    return f"<figure>\n<h2>{escape(figure.title)}</h2>\n{svg}{caption}{values}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = [f"<tr>{head}</tr>\n"] if any(table.columns) else []
    for name, *cells in table.rows:
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n")
    return f"<table>\n{''.join(rows)}</table>"


def terminal(report: ReportPage) -> Group:
    """Render the subtitle, notes, figures (title, tables, caption) and tables for a terminal of at least 80 columns."""
    parts: list[RenderableType] = [Text(line) for line in (*report.subtitle, *report.notes)]
    for figure in report.figures:
        parts += [Text(), Text(figure.title, "bold"), *map(_rich_table, figure.tables)]
        parts += [Text(figure.caption)] if figure.caption else []
    for table in report.tables:
        parts += [Text(), _rich_table(table)]
    return Group(*parts)


def _rich_table(table: Table) -> RichTable:
    rows = RichTable(box=SIMPLE, pad_edge=False, title=Text(table.heading), title_justify="left", title_style="")
    for i, column in enumerate(table.columns):
        heading = "\n".join(textwrap.fill(line, 14, break_long_words=False) for line in column.splitlines())
        rows.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in table.rows:
        rows.add_row(*map(Text, row))
    return rows
