"""Write an HTML report on the JSON object of a benchmark or of `odc-mpi simulate`, or one of its figures as SVG.

    python benchmarks/bench_report.py RESULT.json [--out FILE] [--picture NAME]

Figures of `schedule_speed.py` and `odc-mpi simulate`: collectives and windows on one time axis (`gantt`), speed-ups and
idle time of all schedules (`speedups`). Of `train_speed.py`: tokens per second and ratios (`speeds`), the loss
(`loss`). Of `transport_speed.py`: GB/s over the size of a unit (`speeds`). Does not use MPI.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from odc_mpi.cli.options import Parser, as_path
from odc_mpi.errors import UserError
from odc_mpi.formatting import format_seconds, format_size
from odc_mpi.report import plots, report, schedule_report
from odc_mpi.report.page import Figure, ReportPage, Table
from odc_mpi.report.plots import BarPanel, Curve, Panel, Style
from odc_mpi.report.svg import BLUE, GREEN, ORANGE, PURPLE, SKY
from odc_mpi.runtime.ranks import print_error

#: Styles of the bars of references that do not use this package for communication.
_BAR_STYLES = dict.fromkeys(("ceiling", "fsdp2"), Style(SKY, "\\"))
#: Labels of curves and table columns, keyed by variant.
_FETCHES = {
    "memcpy": "memcpy",
    "fetch_copy": "fetch",
    "fetch_zero_copy": "zero-copy",
    "mpi_allgather": "MPI_Allgather",
}
_PUSHES = {
    "memcpy": "memcpy",
    "push_accumulate": "accumulate",
    "push_mailbox": "mailbox",
    "mpi_reduce_scatter": "MPI_Reduce_\nscatter",
}
#: Styles of the curves, in order.
_LINES = (
    {"color": PURPLE, "linestyle": ":", "marker": "x"},
    {"color": BLUE, "marker": "o"},
    {"color": ORANGE, "marker": "D"},
    {"color": GREEN, "linestyle": "-.", "marker": "s"},
)


def main() -> int:
    """Write the report, print its path, and return the exit code."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("source", type=as_path, metavar="RESULT", help="output of a benchmark with --json")
    parser.add_argument("--out", type=as_path, metavar="FILE", help="default: beside the JSON")
    parser.add_argument("--picture", metavar="NAME", help="write only this figure as SVG, such as gantt")
    try:
        arguments = parser.parse_args()
        print(report.write(arguments.source, arguments.out, arguments.picture, KINDS))
    except UserError as error:
        print_error(error)
        return 2
    return 0


def _schedule(result: Mapping[str, Any]) -> ReportPage:
    measured = (
        f"Measured on {result['library']}, {result['nodes']} node{'s'[: result['nodes'] != 1]}, with sleeps in "
        f"place of computation, scaled so that an even share of a minibatch takes {result['slept_step_s']:g} s; "
        "times are before scaling"
    )
    page = schedule_report.describe(result, measured)
    return replace(page, subtitle=[*page.subtitle, *_load(result)])


def _train(result: Mapping[str, Any]) -> ReportPage:
    ratios, speeds = result["ratio_to_fsdp2"], result["tokens_per_s"]
    panels = [
        BarPanel("tokens per second, with quartiles", speeds, ",.0f", quartiles=result["quartiles"]),
        BarPanel("as a multiple of FSDP2", ratios, ".2f", 1.0),
        BarPanel("as a multiple of the ceiling", result["ratio_to_ceiling"], ".2f", 1.0),
    ]
    best, fsdp = (max((n for n in ratios if n.startswith(kind)), key=ratios.get) for kind in ("window/", "fsdp2"))
    title = f"{best} trains {ratios[best] / ratios[fsdp]:.2f} times as fast as FSDP2 with its better plan ({fsdp})"
    caption = "Medians over rounds. The ceiling is the speed of a single process, multiplied by the number of ranks."
    figures = [schedule_report.bar_figure("speeds", title, panels, speeds, caption, _BAR_STYLES)]
    losses = result["losses"]
    heading = f"All train the same: losses differ by at most {max(result['loss_deviation'].values()):.1g} of the loss"
    values = [math.nan if loss is None else loss for loss in losses]
    curve = Curve("", range(1, len(losses) + 1), values, {"color": BLUE})
    draw = partial(plots.curves, rows=[[Panel("loss", [curve])]], xlabel="minibatch")
    figures.append(Figure("loss", heading, draw))
    subtitle = [
        f"{result['library']}, {result['ranks']} ranks of {result['threads']} thread{'s'[: result['threads'] != 1]}, "
        f"{result['model_numel'] / 1e6:.1f} M parameters; {result['repeats']} rounds of {result['steps']} minibatches",
        f"reduction {result['reduction']}, zero-copy {result['zero_copy']}, progress {result['progress']}",
        *_load(result),
    ]
    return ReportPage(title, subtitle, figures=figures)


def _transport(result: Mapping[str, Any]) -> ReportPage:
    sizes = result["sizes"]
    largest = sizes[-1]["all_at_once"]["fetch_copy"]
    title = f"A fetch of {format_size(sizes[-1]['size_bytes'])} moves {largest['gb_per_s']['median']:.2g} GB/s"
    panels = {"fetch a unit, GB/s": _FETCHES, "push its gradient, GB/s": _PUSHES}
    curves = [_curves(heading, sizes, titles) for heading, titles in panels.items()]
    draw = partial(plots.curves, rows=[curves], xlabel="bytes of a unit", x_form=lambda x: format_size(round(x)))
    tables = [
        _table_over_sizes(f"{heading} ± half the interquartile range", sizes, titles)
        for heading, titles in panels.items()
    ]
    caption = "GB/s of the full unit per rank; medians over rounds. Zero-copy fetches move no data, so have no speed."
    ranks, nodes, cores = result["ranks"], result["nodes"], result["cores_per_rank"]
    subtitle = [
        f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}, "
        f"{cores} core{'s'[: cores != 1]} each, {result['repeats']} rounds, all ranks at once",
        *_load(result),
    ]
    return ReportPage(title, subtitle, figures=[Figure("speeds", title, draw, caption, tables)])


def _curves(heading: str, sizes: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Panel:
    curves = []
    for (name, title), style in zip(titles.items(), _LINES, strict=True):
        entries = [(size["size_bytes"], size["all_at_once"].get(name)) for size in sizes]
        points = [(x, entry["gb_per_s"]["median"]) for x, entry in entries if entry and entry["gb_per_s"]]
        if points:
            x, y = zip(*points, strict=True)
            curves.append(Curve(title.replace("\n", ""), x, y, style))
    return Panel(heading, curves, "log", 320)


def _table_over_sizes(heading: str, sizes: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Table:
    entries = [size["all_at_once"] for size in sizes]
    names = {name: title for name, title in titles.items() if any(name in each for each in entries)}
    rows = [
        [format_size(size["size_bytes"]), *(_gb_per_s(each[name]) if name in each else "-" for name in names)]
        for size, each in zip(sizes, entries, strict=True)
    ]
    return Table(heading, ["unit", *names.values()], rows)


def _gb_per_s(entry: Mapping[str, Any]) -> str:
    """Format the median GB/s with half the interquartile range in %, or the time if the variant moves no data."""
    speed = entry["gb_per_s"]
    if speed is None:
        return format_seconds(entry["seconds"]["median"])
    digits = 0 if speed["median"] >= 100 else 1 if speed["median"] >= 10 else 2
    return f"{speed['median']:.{digits}f} ±{(speed['high'] - speed['low']) / 2 / speed['median']:4.0%}"


def _load(result: Mapping[str, Any]) -> list[str]:
    return ["load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])]


#: Functions that create a report from a JSON object, keyed by the value of its key `benchmark`.
KINDS = {**report.KINDS, "schedule": _schedule, "train": _train, "transport": _transport}

if __name__ == "__main__":
    sys.exit(main())
