"""`odc-mpi report`: write an HTML report. Does not use MPI."""

import argparse

from odc_mpi.cli.options import as_path

HELP = "render a run or a simulation as one HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi report`."""
    parser.description = "Write a self-contained HTML page with figures. Does not need MPI."
    parser.add_argument(
        "source", type=as_path, metavar="RUN_OR_JSON", help="run directory, or JSON of odc-mpi simulate"
    )
    parser.add_argument("--out", type=as_path, metavar="FILE", help="default: RUN/report.html, or beside the JSON")
    parser.add_argument("--picture", metavar="NAME", help="write only this figure as SVG, such as gantt")


def run(arguments: argparse.Namespace) -> int:
    """Write a report or one of its figures, print the path of the output file, and return the exit code."""
    from odc_mpi.report import report

    print(report.write(arguments.source, arguments.out, arguments.picture))
    return 0
