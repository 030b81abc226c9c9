"""Implementation of `odc-mpi report`, which writes an HTML report on a run or a simulation, or one plot as SVG."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from odc_mpi.errors import UserError
from odc_mpi.files import parse_json, write_text_durable
from odc_mpi.report import page, run_report, schedule_report

#: Suffixes that the output file may have only if they match its format.
_FORMATS = {".html", ".svg", ".png", ".jpg", ".jpeg", ".pdf"}
#: Functions that create a report from a JSON object, keyed by the value of its key `benchmark`. They raise LookupError,
#: TypeError, ValueError, AttributeError or ArithmeticError if the object is damaged.
Kinds: TypeAlias = Mapping[str, Callable[[Mapping[str, Any]], page.ReportPage]]
KINDS: Kinds = {"simulate": schedule_report.describe}


def write(source: Path, out: Path | None = None, plot_name: str | None = None, kinds: Kinds = KINDS) -> Path:
    """Write a report on a run or a JSON object as HTML, or one of its plots as SVG, and return the path of the output.

    Args:
        source: Run directory, or file with a JSON object of one of `kinds`, such as that of `odc-mpi simulate --json`.
        out: Output file. By default, report.html or report.PLOT.svg in the run directory, or the path of the source
            file with the suffix .html or .PLOT.svg.
        plot_name: Name of the plot to write as SVG. By default, the report is written as HTML.
        kinds: Reports on JSON objects.

    Raises:
        UserError: The source is invalid or damaged, the report has no plot `plot_name`, or the output file cannot be
            written or has the suffix of another format.
    """
    ending = ".html" if plot_name is None else f".{plot_name}.svg"
    form = ending[ending.rindex(".") :]
    if out and out.suffix.lower() in _FORMATS - {form}:
        raise UserError(f"--out: expected a name that ends in {form} for {form[1:].upper()} output, got {out}")
    try:
        kind = "a run directory" if source.is_dir() else f"the JSON of {' or '.join(kinds)}"
        described = run_report.describe(source) if source.is_dir() else _describe(source, kinds)
        text = _draw(described, plot_name)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{source}: cannot read {error.filename}: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        message = f"there is no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{source}: expected {kind}, undamaged; {' '.join(message.split())}") from error
    out = out or (source / f"report{ending}" if source.is_dir() else source.with_suffix(ending))
    if out.is_file() and (out.suffix.lower() != form or out.samefile(source)):
        raise UserError(f"--out: expected a new file, or {form[1:].upper()} to replace, got {out}: change --out")
    try:
        write_text_durable(out, text)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
    return out


def _describe(source: Path, kinds: Kinds) -> page.ReportPage:
    try:
        content = parse_json(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{source}: expected a run directory or a JSON file, got: {error.strerror}") from None
    kind = content.get("benchmark") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        got = f"output of {kind}" if isinstance(kind, str) else "other JSON"
        raise UserError(f"{source}: expected the --json output of {' or '.join(sorted(kinds))}, got {got}")
    return kinds[kind](content)


def _draw(report: page.ReportPage, name: str | None) -> str:
    if name is None:
        return page.html(report)
    figures = {figure.name: figure for figure in report.figures}
    if name not in figures:
        known = f"expected one of {', '.join(figures)}" if figures else "this report has no pictures"
        raise UserError(f"--picture {name}: {known}")
    return figures[name].svg()
