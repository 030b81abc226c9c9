"""`odc-mpi report`: write an HTML report. Does not use MPI."""

import argparse
from pathlib import Path

HELP = "render a run or a benchmark as one HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi report`."""
    parser.description = "Write a self-contained HTML page with figures. Does not need MPI."
    parser.add_argument("source", type=Path, metavar="RUN_OR_BENCH", help="run directory or JSON of bench or simulate")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html, or next to the JSON file")
    parser.add_argument("--picture", metavar="NAME", help="write only this figure as SVG, such as gantt")


def run(arguments: argparse.Namespace) -> int:
    """Write a report or one of its figures, print the path of the output file, and return the exit code."""
    from odc_mpi.report import report

    print(report.write(arguments.source, arguments.out, arguments.picture))
    return 0
