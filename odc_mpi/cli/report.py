"""`odc-mpi report`: its options and its run. One process, no MPI."""

import argparse
from pathlib import Path

HELP = "a page with pictures of a run or a benchmark"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = "Write one HTML file with pictures, which needs no other file. Needs no MPI."
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_BENCH",
        help="a run directory, or what bench or simulate printed with --json",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html, or beside the JSON file")
    parser.add_argument("--picture", metavar="NAME", help="write this picture alone, as SVG, such as gantt")


def run(arguments: argparse.Namespace) -> int:
    """Write a report, say where it is, and return the exit code.

    Raises:
        UserError: There is nothing to report on, or the file cannot be written.
    """
    from odc_mpi.report import report

    print(report.write(arguments.source, arguments.out, arguments.picture))
    return 0
