"""`odc-mpi bench`: a file for each benchmark, with its options and its run.

Each starts mpiexec where it is not under it, and measures on all ranks.
"""

import argparse

from odc_mpi.cli.bench import checkpoint, gpu, progress, schedule, train, transport
from odc_mpi.cli.bench.under_mpiexec import add_timeout

HELP = "measure what this machine achieves"
#: In the order of the help. Each has `HELP`, `DESCRIPTION`, `add_arguments` and `run`.
BENCHMARKS = {
    "transport": transport,
    "schedule": schedule,
    "train": train,
    "checkpoint": checkpoint,
    "progress": progress,
    "gpu": gpu,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their options. Local."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        one = benchmarks.add_parser(
            name,
            help=benchmark.HELP,
            description=f"{benchmark.DESCRIPTION} Starts mpiexec if it is not under it.",
            allow_abbrev=False,
        )
        benchmark.add_arguments(one)
        add_timeout(one)


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark and return the exit code. Collective, under mpiexec."""
    return BENCHMARKS[arguments.benchmark].run(arguments)
