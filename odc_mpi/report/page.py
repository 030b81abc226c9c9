"""Self-contained HTML pages with text, tables and plots, for light mode, dark mode and print."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from odc_mpi.report.plot_types import INK, LINE, MUTED, PAPER, Plot

_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", PAPER: "--paper"}
_DARK = {"--ink": "#e6edf3", "--muted": "#9aa4af", "--line": "#3d444d", "--paper": "#151b23"}

_STYLE = """
body { font: 16px/1.5 system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.1rem; margin-top: 2.5rem; }
figure { margin: 2.5rem 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; display: block; }
figcaption, .lead { color: var(--muted); max-width: 75ch; }
figcaption { font-size: 0.9rem; }
.note { border-left: 4px solid #e69f00; padding-left: 0.8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 1.5rem 0.2rem 0; vertical-align: top;
         overflow-wrap: anywhere; }
th { text-align: left; font-weight: 600; white-space: nowrap; }
pre { overflow-x: auto; background: color-mix(in srgb, var(--line) 35%, transparent); padding: 1rem; }
"""


@dataclass(frozen=True)
class Table:
    """Table of texts.

    Attributes:
        heading: Heading above the table.
        columns: Column headings. The first column has the names of the rows.
        rows: Rows of cells, with one cell per column.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """Plot with a caption. A terminal shows the tables instead of the plot."""

    plot: Plot
    caption: str = ""
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class ReportPage:
    """Content of a page, from top to bottom.

    Attributes:
        subtitle: Lines of text that describe the run or benchmark.
        notes: Remarks, for example about missing data.
        collapsed: Long texts by heading, which are hidden until a reader opens them.
    """

    title: str
    subtitle: Sequence[str]
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    collapsed: Mapping[str, str] = field(default_factory=dict)


def html(report: ReportPage) -> str:
    """Render a report as an HTML document."""
    light = "; ".join(f"{name}: {color}" for color, name in _VARIABLES.items())
    dark = "; ".join(f"{name}: {color}" for name, color in _DARK.items())
    variables = f":root {{ color-scheme: light dark; {light} }}\n"
    variables += f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    body = [
        f"<h1>{escape(report.title)}</h1>",
        *(f'<p class="lead">{escape(line)}</p>' for line in report.subtitle),
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        *(_figure(figure) for figure in report.figures),
        *map(_table, report.tables),
        *(
            f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>"
            for heading, text in report.collapsed.items()
        ),
    ]
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    head += f"<title>{escape(report.title)}</title>\n<style>\n{variables}{_STYLE}</style>"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _figure(figure: Figure) -> str:
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f"<figure>\n{_inline(figure.plot)}{caption}</figure>"


def _inline(plot: Plot) -> str:
    """Return an SVG element without XML prolog, with unique ids and with the color variables of the page."""
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plot.name}-", svg)
    for color, name in _VARIABLES.items():
        svg = svg.replace(color, f"var({name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.title)}"', 1)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = [f"<tr>{head}</tr>\n"] if any(table.columns) else []
    for name, *cells in table.rows:
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n")
    return f"<h2>{escape(table.heading)}</h2>\n<table>\n{''.join(rows)}</table>"
